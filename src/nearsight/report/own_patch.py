"""Heads that look at their own patch: near by their distance, and yet at none of their neighbours."""

from typing import Final

OWN_PATCH: Final = 0.5
"""Of the distance to the next patch: a head below it spends more on the query's own patch than on all others."""
