"""From logits to tokens, a whole step at a time.

`sampler` is the entry point; a stage that changes logits is a class with `uses`, `set` and `apply`.
"""
