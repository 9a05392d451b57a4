"""One batch: its manifest, plan, parts, input and outputs, its creation and its end."""
