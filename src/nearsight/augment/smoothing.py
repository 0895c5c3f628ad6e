"""Label smoothing on target distributions."""

from torch import Tensor


def smooth_targets(targets_KBC: Tensor, smoothing_K: Tensor) -> Tensor:
    """(1 - ε)·target + ε/classes, as `torch.nn.CrossEntropyLoss(label_smoothing=ε)` does with probability targets."""
    smoothing = smoothing_K[:, None, None]
    return targets_KBC * (1 - smoothing) + smoothing / targets_KBC.shape[-1]
