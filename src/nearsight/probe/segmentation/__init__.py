"""A small head on frozen features: what they know about pixels (S2)."""
