"""Which request gets how many tokens in a step, and the blocks of the KV cache."""
