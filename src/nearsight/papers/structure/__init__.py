"""S3, spatial structure: what attention learns from positions, on simulated patches and on images."""
