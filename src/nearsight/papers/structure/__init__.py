"""S3, spatial structure: what attention learns from positions, on simulated patches and on images."""

PAPER = "S3 (arXiv 2210.09221)"
"""Vision Transformers provably learn spatial structure (NeurIPS 2022)."""
