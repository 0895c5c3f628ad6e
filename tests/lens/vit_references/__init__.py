"""What the lens should find in a model, by routes that share no code with it.

Attention maps come from a model's own unfused code in float64 (`maps`), places of tokens from its own functions for
windows and pooling, applied to a grid of coordinates (`mechanisms`), numbers from plain dense sums (`dense`).
`families` says which route each architecture of timm takes.
"""
