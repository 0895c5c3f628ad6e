"""Hand-fused paths of the stacked engine: what transformer blocks do between their matrix products (Triton).

A block of a small ViT has little arithmetic per byte: on an H200, the products of the compact ViT would take 3 ms of a
step of 24 cells, reading and writing what lies between them one operation at a time 15. So everything between two
products is one kernel: residual, bias and norm; bias and GELU; the whole of attention, with LocAt's local bias or
without. Products stay the library's, also those by maps that all images share.

`pending` finds out, while a model's own code runs, which of its operations form such branches.
"""
