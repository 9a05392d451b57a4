"""The interpreter where there is no GPU, and GPUs that a test leaves as it found them."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.interpreter import choose_interpreter
from workers.engine.attention.base import CacheShape
from workers.engine.scheduling.forecast import AdmissionForecast

choose_interpreter()


@pytest.fixture(autouse=True)
def _gpu_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """A core's memory is tied up in cycles, and the next test may size its cache by what is
    free.
    """
    yield
    if request.node.get_closest_marker("gpu") is not None:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _tiles_of_no_measurement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each new shape of a tiny model would compile and time ten choices first."""
    if request.node.get_closest_marker("gpu") is None:
        return
    from workers.engine.kernels import tile_choices

    choices = tile_choices.choices

    def unmeasured(shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> object:
        return choices(shape, num_heads, dtype, torch.device("cpu"))

    monkeypatch.setattr(tile_choices, "choices", unmeasured)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come in without a look at how long they get, so that in a small cache some have to
    be preempted.
    """
    monkeypatch.setattr(AdmissionForecast, "has_room", lambda *_: True)
