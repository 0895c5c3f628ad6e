"""Locality over training time: when it comes, where, and whether accuracy leads or follows."""
