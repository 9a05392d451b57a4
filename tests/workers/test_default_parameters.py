"""Defaults that follow from a worker's flags and its model's folder."""

import json
from pathlib import Path

import pytest

from jobs.protocol.default_parameters import DefaultParameters
from jobs.settings import SettingsError
from workers.default_parameters import local_defaults
from workers.engine.messages.config import EngineConfig
from workers.errors import WorkerError
from workers.settings import WorkerSettings

OWN = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "eos_token_id": 2}


def defaults(folder: Path, source: str = "auto", override: str | None = None) -> DefaultParameters | None:
    engine = EngineConfig(model=str(folder), generation_config=source)
    return local_defaults(WorkerSettings(engine=engine, override_generation_config=override))


def write(folder: Path, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_they_come_from_the_model_or_another_folder_and_the_override_goes_before(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", **OWN), write(tmp_path / "other", top_k=5)
    own = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    assert defaults(model) == own
    assert defaults(model, override='{"temperature": 0, "top_p": null}') == {"temperature": 0.0, "max_tokens": 50}
    assert defaults(model, "vllm") == {}
    assert defaults(model, "vllm", '{"min_p": 0.1}') == {"min_p": 0.1}
    assert defaults(model, str(other)) == {"top_k": 5}
    (model / "generation_config.json").unlink()
    assert defaults(model) == {}
    assert defaults(Path("organization/model-of-the-hub")) is None


def test_a_folder_without_them_and_a_value_out_of_range_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkerError, match=r"empty/generation_config\.json cannot be read"):
        defaults(tmp_path, str(tmp_path / "empty"))
    with pytest.raises(WorkerError, match=r"temperature.*<= 2, but got 3.* --generation-config vllm"):
        defaults(write(tmp_path / "hot", temperature=3.0))
    (tmp_path / "hot" / "generation_config.json").write_text("{")
    with pytest.raises(WorkerError, match="not valid JSON"):
        defaults(tmp_path / "hot")


@pytest.mark.parametrize("text", ["hot", "[1]", '{"eos_token_id": 2}', '{"top_p": 2}'])
def test_a_bad_override_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="OVERRIDE_GENERATION_CONFIG"):
        WorkerSettings(override_generation_config=text)
