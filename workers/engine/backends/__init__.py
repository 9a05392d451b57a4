"""The backends; each is one object that creates layers, attention, inputs and the draw."""
