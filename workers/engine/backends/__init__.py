"""The backends, each one object: what a model's layers, attention, inputs and draw are made of."""
