"""Read folders saved by sentence-transformers, with the modules after the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json
from workers.engine.models.json_file import read_json, read_json_list
from workers.engine.models.pooling_config import MODES, DenseConfig, PoolingConfig
from workers.model_folder import MODULES, transformer_folder

_PACKAGE = "sentence_transformers."
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
"""Settings of the modes, in the order in which sentence-transformers concatenates their results."""
_SET = ("mean",)  # settings that default to true
_NAMES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid", "SiLU": "silu"}


def embedding_config(folder: Path, raw: Json, bidirectional: bool) -> PoolingConfig:
    """Return the pooling settings of an embedding model.

    They come from `modules.json`. Without one, a bidirectional model pools by the mean, the default
    of sentence-transformers, and a causal one by the last token. Raises ModelLoadError.
    """
    plain = PoolingConfig(("mean",)) if bidirectional else PoolingConfig(("last",), normalize=True)
    config = read_modules(folder) if (folder / MODULES).is_file() else plain
    sizes = raw.get("matryoshka_dimensions") or ()
    return replace(config, sizes=tuple(map(int, sizes)), any_size=bool(raw.get("is_matryoshka")) and not sizes)


def read_modules(folder: Path) -> PoolingConfig:
    """Return the pooling settings in the modules of a folder.

    The modules must pool, then project any number of times, then optionally normalize. Raises
    ModelLoadError for others, and for modules whose code is not sentence-transformers' own.
    """
    modules = read_json_list(folder / MODULES)
    types = [str(module.get("type", "")) for module in modules]
    foreign = [name for name in types if not name.startswith(_PACKAGE)]
    if foreign:
        raise ModelLoadError(
            f"{folder / MODULES} names the module {foreign[0]!r}; code from elsewhere than sentence-transformers is"
            " never run, so choose a model without such modules"
        )
    kinds = [name.rpartition(".")[2] for name in types]
    paths = [str(module.get("path", "")) for module in modules]
    normalize = kinds[-1:] == ["Normalize"]
    between = kinds[2 : len(kinds) - normalize]
    if kinds[:2] != ["Transformer", "Pooling"] or between != ["Dense"] * len(between):
        raise ModelLoadError(
            f"{folder / MODULES} lists the modules {', '.join(kinds) or 'none'}; the engine runs Transformer, Pooling,"
            " any number of Dense and perhaps Normalize, in this order"
        )
    if transformer_folder(folder) != folder / paths[0]:
        raise ModelLoadError(f"{folder / MODULES} has the model itself in {paths[0]}, where no config.json is")
    return PoolingConfig(
        modes=_pooling_modes(folder / paths[1] / "config.json"),
        normalize=normalize,
        dense=tuple(_dense(folder / path) for path in paths[2 : 2 + len(between)]),
    )


def _pooling_modes(file: Path) -> tuple[str, ...]:
    """Return the pooling modes whose results are concatenated."""
    raw = read_json(file)
    given = raw.get("pooling_mode")
    flagged = [mode for mode, flag in _FLAGS.items() if raw.get(flag, mode in _SET)]
    named = [given] if isinstance(given, str) else given or flagged
    modes = tuple(_NAMES.get(str(name), str(name)) for name in named)
    if not modes or not set(modes) <= set(MODES):
        raise ModelLoadError(
            f"{file} asks for the pooling {' and '.join(modes) or 'of no kind'}; supported are {', '.join(MODES)}"
        )
    return modes


def _dense(folder: Path) -> DenseConfig:
    file = folder / "config.json"
    raw = read_json(file)
    named = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if named not in _ACTIVATIONS:
        raise ModelLoadError(f"{file} asks for the activation {named}; supported are {', '.join(_ACTIVATIONS)}")
    size_in, size_out = _size(file, raw, "in_features"), _size(file, raw, "out_features")
    return DenseConfig(folder, size_in, size_out, bool(raw.get("bias", True)), _ACTIVATIONS[named])


def _size(file: Path, raw: Json, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{file} has no usable {name!r} (found {value!r})")
    return value
