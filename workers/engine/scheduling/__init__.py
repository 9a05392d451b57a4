"""Schedule the tokens of requests in each step, and manage the blocks of the KV cache."""
