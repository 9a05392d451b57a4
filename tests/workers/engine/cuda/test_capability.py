"""What a GPU's numbers say of it."""

import pytest
import torch

from workers.engine.cuda.capability import has_float8


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((8, 0), None, False), ((8, 9), None, True), ((9, 0), None, True), ((9, 4), "7.0.2", False)],
)
def test_float8_needs_an_nvidia_gpu_that_has_it(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_float8(torch.device("cuda")) == expected
    assert has_float8(torch.device("cpu"))
