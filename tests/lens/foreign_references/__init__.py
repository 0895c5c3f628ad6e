"""What the lens should find in models of other libraries than timm, by routes that share no code with it.

As in `vit_references`: attention maps come from a model's own unfused code in float64 (`recording`), places of tokens
are stated per architecture (`places`, `video_places`), numbers are plain dense sums (`expected`). `registry` lists the
cases, a library or a way to attend per file; `outcomes` says of each whether the lens is right, refuses or is wrong;
`write_rows` makes the tables.
"""
