"""S2, LocAt: Gaussian-augmented attention and patch refinement, by accuracy, layers and frozen features."""
