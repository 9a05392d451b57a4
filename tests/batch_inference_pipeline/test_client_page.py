"""docs/client.md and the README: the examples run as printed."""

import re

import pytest

from tests.support.commands import REPOSITORY

BLOCKS = [
    pytest.param(block, id=f"{page}-{number}", marks=[pytest.mark.proof] if page == "README.md" else [])
    for page in ("docs/client.md", "README.md")
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)
    )
    if "batch_inference_pipeline" in block
]


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_runs(block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_DEVICE", "cpu")
    exec(compile(block, "the example", "exec"), {"__name__": "example"})
    assert "Count: 2, 3, 4, 5" in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 4
