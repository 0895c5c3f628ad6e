"""S3 on real images: shuffled tiles, attention from positions alone, and what learned positions have to do with S1."""
