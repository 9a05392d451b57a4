"""The commands that `make bench` and `make bench-full` run, in this order."""

QUICK: tuple[tuple[str, ...], ...] = (
    ("start_up", "--turns", "3"),
    ("alone",),
    ("engine", "--kind", "random", "--requests", "64", "--turns", "2"),
    ("engine", "--kind", "shared", "--requests", "256", "--turns", "1"),
    ("int8", "--turns", "1"),
    ("int4", "--turns", "1"),
    ("run_batch", "--requests", "128", "--turns", "1"),
    ("queue_cost", "--requests", "1024", "--turns", "1"),
    ("control_plane",),
    ("batch_sizes",),
    ("step_profile",),
    ("structured_outputs", "--turns", "3", "--single-turns", "5", "--schemas", "100"),
    ("live", "--turns", "1", "--scale", "0.5", "--requests", "64"),
    ("idle",),
)
"""Needs no other program; some minutes on two cores."""

_VLLM = ("--against", "vllm")

FULL: tuple[tuple[str, ...], ...] = (
    ("start_up",),
    ("alone",),
    ("alone", "--against", "llama.cpp"),
    ("alone", "--quantization", "int8", "--against", "llama.cpp"),
    ("engine", "--kind", "random", "--requests", "64", "--turns", "5", *_VLLM),
    ("engine", "--kind", "shared", "--requests", "256", "--turns", "3", *_VLLM),
    ("engine", "--model", "llama-135m", "--kind", "random", "--requests", "64", "--turns", "3", *_VLLM),
    ("engine", "--model", "qwen3-0.6b", "--kind", "random", "--requests", "64", "--turns", "3", *_VLLM),
    ("int8",),
    ("int4",),
    ("run_batch", "--requests", "128", "--turns", "3", *_VLLM),
    ("run_batch", "--requests", "1024", "--turns", "2", *_VLLM),
    ("queue_cost", "--requests", "1024", "--turns", "2"),
    ("batch_sizes",),
    ("step_profile",),
    ("sampling",),
    ("structured_outputs",),
    ("structured_outputs", "--turns", "3", *_VLLM),
    ("live",),
    ("live", "--turns", "2", *_VLLM),
    ("idle",),
)
"""Everything, with vLLM's CPU build and llama.cpp by turns; under an hour on two cores."""
