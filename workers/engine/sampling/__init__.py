"""Sample tokens from logits, for all rows of a step at once.

`sampler` is the entry point; a stage that changes logits is a class with `uses`, `set` and `apply`.
"""
