"""Attention with the Gaussians of GAug on a GPU, forward and backward, and no map in memory (S2 Eq. 8–10).

A query's Gaussian is the product of one factor per grid row and one per grid column. So keys are taken in tiles that
are some grid rows by some columns, and of each tile only the factors of its lines are made, not those of its pairs. A
tile's columns are the same for all tiles below each other: a program keeps their factors while it goes down the grid.
Per pair of tokens, the Gaussian costs one multiply-add in each pass, and two more where its own gradients are summed.

Grids that tiles do not fit leave some slots of tiles empty. Prefix tokens have theirs below the last row.
"""

from nearsight.locat.kernels.attention import gaussian_attention, is_supported

__all__ = ["gaussian_attention", "is_supported"]
