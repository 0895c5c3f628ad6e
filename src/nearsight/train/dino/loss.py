"""DINO's loss: what the student says of every view against what the teacher says of the other global views.

Shape suffixes: G global views, V views (the global ones first), B samples, P prototypes.
"""

import torch
from torch import Tensor


def teacher_distributions(cosines_GBP: Tensor, centre_P: Tensor, temperature: Tensor | float) -> Tensor:
    """Centred and sharpened: softmax((t − c) / τ), float32 [G, B, P]. Nothing flows back."""
    return torch.softmax((cosines_GBP.detach().float() - centre_P) / temperature, dim=-1)


def dino_loss(student_VBP: Tensor, teacher_GBP: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of each view of the student with each global view of the teacher, but for a view with itself.

    Args:
        student_VBP: cosines of the student.
        teacher_GBP: distributions of the teacher.
        temperature: of the student.
    """
    num_global, num_views = len(teacher_GBP), len(student_VBP)
    # Cross-entropy is linear in the target, so a view meets the sum of its targets: V passes, and not G · V.
    all_BP = teacher_GBP.sum(0)
    total = student_VBP.new_zeros((), dtype=torch.float32)
    for view, student_BP in enumerate(student_VBP):
        target_BP = all_BP - teacher_GBP[view] if view < num_global else all_BP
        log_BP = torch.log_softmax(student_BP.float() / temperature, dim=-1)
        total = total - (target_BP * log_BP).sum(-1).mean()
    return total / (num_global * (num_views - 1))


def next_centre(centre_P: Tensor, batch_mean_P: Tensor, momentum: float) -> Tensor:
    """The running mean of the teacher's cosines."""
    return momentum * centre_P + (1 - momentum) * batch_mean_P


def entropy(distribution: Tensor) -> Tensor:
    """In nats, over the last axis."""
    nats: Tensor = torch.special.entr(distribution).sum(-1)
    return nats
