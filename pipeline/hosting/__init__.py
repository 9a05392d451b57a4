"""Several models on one machine: which there are, what they need, when each is loaded."""
