"""Attention and norms that are wrong on a processor are left to torch."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import REPOSITORY
from tests.workers.engine.driving import make_core, resolved, run
from tests.workers.engine.models.tiny_models import reference
from tests.workers.engine.native.available import needs_native
from tests.workers.engine.places import CPU, TORCH
from workers.engine.attention.reference import TorchAttention
from workers.engine.core import EngineCore
from workers.engine.device import resolve
from workers.engine.layers.stack import LayerStack
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.native import checks, ops
from workers.engine.native.attention import CpuAttention
from workers.engine.native.build import find_compilers
from workers.engine.native.checks import attention_matches_torch, norms_match_torch
from workers.engine.native.norms import native_norm
from workers.engine.native.stack import NativeStack

pytestmark = needs_native

MODEL = "qwen3"  # its queries and keys are normed
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def compared_anew() -> Iterator[None]:
    for check in (attention_matches_torch, norms_match_torch):
        check.cache_clear()
    yield
    for check in (attention_matches_torch, norms_match_torch):
        check.cache_clear()


def spoil_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuAttention.forward_rotary
    monkeypatch.setattr(CpuAttention, "forward_rotary", lambda *arguments: right(*arguments) * 1.05)


def spoil_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks, ops):
        monkeypatch.setattr(module, "native_norm", lambda *arguments: native_norm(*arguments) * 1.05)


def answers(core: EngineCore) -> list[list[int]]:
    """Return the tokens that an engine adds to prompts."""
    prompts, greedy = reference(MODEL).prompts, SamplingParams(12, temperature=0.0)
    got = run(core, [EngineRequest(number, prompt, [], greedy) for number, prompt in enumerate(prompts)])
    return [got.answers[number].tokens for number in range(len(prompts))]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the checks have logged."""
    return [record.getMessage() for record in caplog.records if record.name == checks.__name__]


def stack_of(core: EngineCore) -> object:
    model: Any = core._executor.runner.model
    return model.stack


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_right_here(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert attention_matches_torch(dtype)
    assert norms_match_torch(dtype)
    assert not said(caplog)


def test_what_is_right_is_used() -> None:
    core = make_core(MODEL, place=CPU)
    assert isinstance(core._executor.runner.layers[0].attention, CpuAttention)
    assert isinstance(stack_of(core), NativeStack)


def test_wrong_attention_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spoil_attention(monkeypatch)
    core = make_core(MODEL, place=CPU)
    assert isinstance(core._executor.runner.layers[0].attention, TorchAttention)
    assert answers(core) == answers(make_core(MODEL, place=TORCH))
    assert said(caplog) == [
        "CPU kernels: attention in float32 differs from torch's here; torch's is used, which may be slower"
    ]


def test_wrong_norms_are_left_to_torch_and_layers_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_norms(monkeypatch)
    core = make_core(MODEL, place=CPU)
    assert type(stack_of(core)) is LayerStack
    assert answers(core) == answers(make_core(MODEL, place=TORCH))
    assert said(caplog) == [
        "CPU kernels: norms in float32 differ from torch's here; torch's are used, which may be slower"
    ]


def test_a_cache_is_in_bfloat16_under_float32_only_where_kernels_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "resolve_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(resolve, "_suits_narrow_cache", lambda _: True)
    assert resolved(MODEL, device="cpu").cache_dtype == "bfloat16"
    attention_matches_torch.cache_clear()
    spoil_attention(monkeypatch)
    assert resolved(MODEL, device="cpu").cache_dtype == "float32"


WRONG_SQUARE_ROOTS = """
import logging
from tests.workers.engine.driving import make_core
from tests.workers.engine.native.test_checks import MODEL, answers
from tests.workers.engine.places import CPU, TORCH

logging.basicConfig()
assert CPU != TORCH
assert answers(make_core(MODEL, place=CPU)) == answers(make_core(MODEL, place=TORCH))
"""


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_library_with_wrong_square_roots(tmp_path: Path) -> None:
    """Norms have them, those of queries and keys within attention too."""
    compiler = shlex.join([*find_compilers()[0], "-Dsqrtf=fabsf"])
    settings = {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run_it = [sys.executable, "-c", WRONG_SQUARE_ROOTS]
    done = subprocess.run(run_it, cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" in float32")[0] for line in done.stderr.splitlines() if "from torch's here" in line]
    assert [line.rsplit(":", 1)[1] for line in lines] == [" norms", " attention"]
