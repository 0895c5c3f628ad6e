"""Attention with a local bias on a GPU, forward and backward, and no map in memory (S2 Eq. 8–10, and what is like it).

A query's Gaussian is the product of one factor per grid row and one per grid column. So keys are taken in tiles that
are some grid rows by some columns, and of each tile only the factors of its lines are made, not those of its pairs. A
tile's columns are the same for all tiles below each other: a program keeps their factors while it goes down the grid.
Per pair of tokens, the Gaussian costs one multiply-add in each pass, and two more where its own gradients are summed.
Other functions of the distance are made for each pair, from the squared distances of rows and columns.

With a reach, a program goes down the rows that are within it alone. Grids that tiles do not fit leave some slots of
tiles empty. Prefix tokens have theirs below the last row.
"""

from nearsight.locat.kernels.attention import is_supported, radial_attention

__all__ = ["is_supported", "radial_attention"]
