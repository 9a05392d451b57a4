"""The optional extras of the package: which modules each brings, and whether they are installed."""

from importlib.util import find_spec

from jobs.version import PACKAGE

EXTRA_OF = {
    "huggingface_hub": "worker",
    "jinja2": "worker",
    "jsonschema": "worker",
    "llguidance": "worker",
    "numpy": "worker",
    "referencing": "worker",
    "safetensors": "worker",
    "tokenizers": "worker",
    "torch": "worker",
    "transformers": "worker",
    "pynvml": "cuda",
    "triton": "cuda",
    "ray": "ray",
    "opentelemetry": "tracing",
}
"""The top-level modules that are imported here and that an extra installs."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{PACKAGE}[{extra}]'"


def missing_module(extra: str) -> str | None:
    """Return a module of an extra that is not installed, None if all are. Import none of them."""
    return next((name for name, of in EXTRA_OF.items() if of == extra and find_spec(name) is None), None)


def hint_for(module: str) -> str | None:
    """Return what installs a module that was not found; None if no extra does."""
    extra = EXTRA_OF.get(module.partition(".")[0])
    return None if extra is None else install_command(extra)
