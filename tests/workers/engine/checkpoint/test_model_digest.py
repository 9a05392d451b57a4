"""The digest of a model depends on the contents of its files, and on nothing else."""

import json
import shutil
from pathlib import Path

from workers.engine.checkpoint.model_digest import digest_of
from workers.settings import DEMO_MODEL

WEIGHTS = "model.safetensors"


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, folder))


def test_a_copy_is_the_same_model_and_a_tokenizer_is_no_part_of_it(tmp_path: Path) -> None:
    folder = copy(tmp_path / "other name")
    (folder / "tokenizer.json").unlink()
    assert digest_of(folder) == digest_of(Path(DEMO_MODEL))


def test_another_value_in_any_tensor_is_another_model(tmp_path: Path) -> None:
    """Tuning changes all of a tensor's values, so those in its middle too."""
    own, folder = digest_of(Path(DEMO_MODEL)), copy(tmp_path / "tuned")
    raw = bytearray((folder / WEIGHTS).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8:start])
    tensors.pop("__metadata__", None)
    for name, tensor in tensors.items():
        begin, end = tensor["data_offsets"]
        place = start + (begin + end) // 2
        changed = raw.copy()
        changed[place] ^= 1
        (folder / WEIGHTS).write_bytes(changed)
        assert digest_of(folder) != own, name
    (folder / WEIGHTS).write_bytes(raw)
    assert digest_of(folder) == own


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    folder = copy(tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "changed": True}))
    assert digest_of(folder) != digest_of(Path(DEMO_MODEL))
