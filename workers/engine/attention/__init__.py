"""Define attention over the paged cache, and implement it in plain torch."""
