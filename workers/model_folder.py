"""Locate the files in a model's folder, and say what a folder is that holds no usable model."""

import json
from collections.abc import Iterable
from pathlib import Path

GENERATION = "generation_config.json"
OWN_GENERATION, NO_GENERATION = "auto", "vllm"
"""Values of --generation-config besides a folder: the model's own; the same, for its stop tokens
alone.
"""

MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model."""


def transformer_folder(folder: Path) -> Path:
    """Return the folder of config.json, tokenizer and weights.

    This is the first folder in `modules.json` if it has a config.json, else `folder`. A
    `modules.json` that cannot be read is ignored.
    """
    try:
        inner = folder / json.loads((folder / MODULES).read_bytes())[0]["path"]
    except (OSError, ValueError, LookupError, TypeError):
        return folder
    return inner if (inner / "config.json").is_file() else folder


_POINTER = b"version https://git-lfs.github.com/spec/"
_ADAPTER = "adapter_config.json"
_GGUF = "in the format GGUF, which is not read; give the folder of the model's safetensors version"
_ORIGINAL = ("params.json", "consolidated*.safetensors", "consolidated*.pth")
_OTHER_WEIGHTS = {"tf_model.h5": "TensorFlow", "flax_model.msgpack": "Flax", "*.onnx": "ONNX"}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json")


def pointer_problem(file: Path) -> str | None:
    """Return a sentence if the file is a Git LFS pointer to its content, else None."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return None
    if not is_pointer:
        return None
    return f"{file} is a Git LFS pointer, without the file's content: run `git lfs pull` in {file.parent}"


def folder_problem(path: Path) -> str | None:
    """Return why a path is not a model's folder, and what to do, in a sentence; None if it may be
    one.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return f"the model {path} is {_GGUF}"
        return f"the model {path} is a file; give the folder that holds config.json and the safetensors files"
    folder = transformer_folder(path)
    for file in (path / MODULES, folder / "config.json"):
        if problem := pointer_problem(file):
            return problem
    if (folder / "config.json").is_file():
        return None
    if problem := other_kind(folder):
        return problem
    if _any(folder, _ORIGINAL):
        return f"{folder} is in its author's own format; give the version with a config.json, for transformers"
    return f"the model folder {path} has no config.json"


def weights_problem(folder: Path) -> str:
    """Return why a model's folder without weights in safetensors has none, and what to do."""
    if problem := other_kind(folder):
        return problem
    if _any(folder, _PICKLED):
        return (
            f"{folder} holds pickled weights only, which are never read: give a version in safetensors, or make one by"
            " transformers' from_pretrained and save_pretrained if you trust the author"
        )
    for pattern, name in _OTHER_WEIGHTS.items():
        if _any(folder, (pattern,)):
            return f"{folder} holds weights for {name} only; give a version in safetensors"
    return f"{folder} holds no weights: there is no .safetensors file in it"


def tokenizer_problem(folder: Path) -> str | None:
    """Return why the folder has no usable tokenizer, and what to do; None if it may have one."""
    files = [file for pattern in _TOKENIZER_FILES for file in sorted(folder.glob(pattern))]
    if files:
        return next((problem for file in files if (problem := pointer_problem(file))), None)
    return (
        f"{folder} has no tokenizer: copy the files of one beside the weights, such as tokenizer.json of the model that"
        " this one was made from, or name that with --tokenizer (a folder or a hub name)"
    )


def other_kind(folder: Path) -> str | None:
    """Return what a folder without a model holds, and what to do; None if it is not known."""
    if (folder / _ADAPTER).is_file():
        base = _base_model(folder / _ADAPTER)
        return (
            f"{folder} is an adapter of {base} ({_ADAPTER}), not a model: merge both (peft's merge_and_unload), save"
            " the result with its tokenizer, and give that folder"
        )
    if _any(folder, ("*.gguf",)):
        return f"{folder} is {_GGUF}"
    return None


def _base_model(file: Path) -> str:
    try:
        base = json.loads(file.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    return str(base or "another model")


def _any(folder: Path, patterns: Iterable[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def generation_file(folder: Path, source: str) -> Path:
    """Return the generation config of the model in `folder`, by the value of --generation-config.

    The model's own need not exist.
    """
    return (folder if source in (OWN_GENERATION, NO_GENERATION) else Path(source).expanduser()) / GENERATION
