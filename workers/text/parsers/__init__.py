"""Parse conventions in a model's output: tool calls, and reasoning before the answer."""
