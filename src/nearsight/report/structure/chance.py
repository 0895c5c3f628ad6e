"""What a matrix that knows nothing would reach."""

from math import comb

from nearsight.data.structured import PatchData


def chance_of_association(data: PatchData) -> float:
    """That a patch is associated when the other entries of its row are in random order, below the diagonal's."""
    return 1 / comb(data.num_patches - 1, data.set_size - 1)
