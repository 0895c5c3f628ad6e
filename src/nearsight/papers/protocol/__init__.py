"""S1, the protocol study: does the training protocol make attention local, which part of it, and what it left open."""
