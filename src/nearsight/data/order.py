"""In which order an epoch visits the images.

Shape suffixes: K cells (models trained together), B samples of a batch.
"""

import torch
from torch import Tensor

from nearsight.errors import InputError, check_at_least
from nearsight.randomness import permutation


def epoch_batches(seed_K: Tensor, epoch: int | Tensor, num: int, batch_size: int) -> Tensor:
    """Positions [steps, K, B] of the images of every step: a permutation per cell, without its incomplete last batch.

    A cell's order depends on its seed and the epoch alone: it sees the same batches whatever it is stacked with.
    """
    check_at_least("the batch size", batch_size, 1)
    if num < batch_size:
        raise InputError(f"the batch size is {batch_size}, but there are {num} images; take at most {num}")
    num_steps = num // batch_size
    epoch = torch.as_tensor(epoch, device=seed_K.device)
    order_KN = permutation(seed_K, "epoch order", epoch, num)[:, : num_steps * batch_size]
    return order_KN.view(len(seed_K), num_steps, batch_size).transpose(0, 1).contiguous()
