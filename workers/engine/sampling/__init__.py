"""From logits to tokens, a whole step at a time.

`sampler` is the entry point; every stage has a file of its own.
"""
