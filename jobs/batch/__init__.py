"""One batch: its manifest, plan, parts, input and outputs, and how it is created and ended."""
