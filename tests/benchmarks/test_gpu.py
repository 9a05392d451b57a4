"""That `make bench-gpu` runs: its rows on tiny models and a CPU, its arithmetic on numbers that can
be checked by hand.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import attention, engine, generate_batch, gpu_rates, idle
from benchmarks.gpu.checkpoints import checkpoint
from benchmarks.gpu.engine import GpuPass
from benchmarks.gpu.roofline import Gpu, cost_of, roofline
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import notes, table
from benchmarks.gpu.workload import Workload, drawn, staircase
from benchmarks.models import SHAPES
from benchmarks.quantized_weights import KINDS
from tests.workers.engine.places import needs_interpreter
from workers.engine.cuda.graphs import sizes

H200 = Gpu(4.3e12, 790e12)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting("cpu", str(tmp_path_factory.mktemp("scratch")), Gpu(1e10, 1e11))


def test_the_workload_is_nano_vllms() -> None:
    work = drawn(256, 100, 1024)
    assert (work.prompt_tokens, work.output_tokens, len(work.prompts)) == (142_827, 133_966, 256)
    other = work.with_other_prompts(seed=2)
    assert [len(prompt) for prompt in other.prompts] == [len(prompt) for prompt in work.prompts]
    assert other.prompts[0][:16] != work.prompts[0][:16]


def test_a_staircase_has_the_decode_steps_asked_for_of_each_size() -> None:
    steps = {size: 2 + size % 3 for size in sizes(256)}
    lengths = staircase(steps, 16).output_lengths
    running = Counter(sum(length > step for length in lengths) for step in range(1, max(lengths)))
    assert running == steps


def test_the_roofline_of_the_smallest_workload_by_hand() -> None:
    """Two requests over weights of 10 + 4 elements and 6 bytes per token: one step with both, two
    with the longer one alone.
    """
    sizes = {"hidden_size": 1, "intermediate_size": 2, "num_hidden_layers": 1, "vocab_size": 4}
    cost = cost_of(sizes | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1})
    assert (cost.layer_weights, cost.head_weights, cost.kv_bytes_per_token, cost.weight_bytes) == (4 + 6, 4, 4, 28)
    least = roofline(cost, Workload([[1, 1, 1], [1]], [2, 4]), Gpu(1.0, 1000.0))
    assert least.kv_bytes == 4 * ((4 + 2) + 3 + 4)
    assert least.weight_bytes == 3 * 28
    assert least.decode_seconds == pytest.approx(3 * 28 + 4 * 13)
    assert least.prompt_seconds == pytest.approx(2 * (4 * 10 + 2 * 4) / 1000)
    fast_memory = roofline(cost, Workload([[1, 1, 1], [1]], [2, 4]), Gpu(1e9, 1000.0))
    assert fast_memory.decode_seconds == pytest.approx(2 * 14 * (2 + 1 + 1) / 1000)


def test_the_roofline_on_an_h200_is_what_the_documentation_says() -> None:
    work = drawn(256, 100, 1024)
    least = roofline(cost_of(SHAPES["qwen3-0.6b"]), work, H200)
    assert (round(least.kv_bytes / 1e12, 2), round(least.weight_bytes / 1e12, 2)) == (13.85, 1.22)
    assert work.output_tokens / least.seconds == pytest.approx(36_556, abs=1)
    least = roofline(cost_of(SHAPES["qwen2.5-0.5b"]), work, H200)
    assert work.output_tokens / least.seconds == pytest.approx(188_764, abs=1)
    least = roofline(cost_of(SHAPES["qwen3-0.6b"]), queue := drawn(1024, 100, 1024), H200)
    assert (queue.prompt_tokens, queue.output_tokens, round(queue.output_tokens / least.seconds)) == (
        580_663,
        583_802,
        38_347,
    )
    work = drawn(1024, 50, 512)
    least = roofline(cost_of(SHAPES["qwen3-8b"]), work, H200)
    assert (work.output_tokens, round(work.output_tokens / least.seconds)) == (294_532, 24_650)


def test_the_gpu_is_measured(setting: Setting) -> None:
    figures = gpu_rates.measure(setting)
    assert min(figures["copy_bytes_per_second"], figures["matrix_operations_per_second"]) > 1e6


@pytest.mark.proof
@needs_interpreter
def test_attention_alone(setting: Setting) -> None:
    figures = attention.decode(setting)
    assert set(figures["gigabytes_per_second"]) == {"16", "48", "mixed"}
    assert figures["bound"] == 10.0
    assert attention.prefill(setting)["lengths"]["32"]["milliseconds"] > 0


@pytest.mark.proof
def test_the_engine_runs_a_workload(setting: Setting) -> None:
    figures = engine.qwen3_06b(setting)
    assert figures["output_tokens"] == engine._benchmark(setting, 0, 0, 0).output_tokens
    assert figures["value"] > 0
    assert figures["bound"] > 0
    assert len(figures["rehearsal_seconds"]) == 1


@pytest.mark.proof
@pytest.mark.parametrize("measure", [engine.qwen3_8b_int4, engine.qwen3_8b_float8])
def test_the_engine_runs_quantized_weights(setting: Setting, measure: Callable[[Setting], dict[str, Any]]) -> None:
    figures = measure(setting)
    assert figures["output_tokens"] == engine._benchmark(setting, 0, 0, 0).output_tokens
    assert figures["bound"] > 0


def test_quantized_weights_are_read_faster_than_16_bits() -> None:
    work = drawn(64, 50, 512)
    plain, *quantized = (
        cost_of(SHAPES["qwen3-8b"], layer_bytes=layer_bytes)
        for layer_bytes in (2, *(kind.bytes_per_weight for kind in KINDS.values()))
    )
    for cost in quantized:
        assert cost.weight_bytes < 0.6 * plain.weight_bytes
        assert roofline(cost, work, H200).seconds < roofline(plain, work, H200).seconds


@pytest.mark.proof
def test_generate_batch_answers_everything(setting: Setting) -> None:
    assert generate_batch._theirs(setting, checkpoint(setting, "qwen3-0.6b"), generate_batch._share(setting)) > 0


def test_idle_time_is_what_no_kernel_covers() -> None:
    """Kernels of two streams that overlap, a gap of 3 us as inside a graph, one of 10 us as between
    steps, and a copy that is no work.
    """
    events = [
        {"cat": "kernel", "ts": 100.0, "dur": 40.0},
        {"cat": "kernel", "ts": 120.0, "dur": 10.0},
        {"cat": "kernel", "ts": 143.0, "dur": 27.0},
        {"cat": "gpu_memcpy", "ts": 171.0, "dur": 5.0},
        {"cat": "kernel", "ts": 180.0, "dur": 20.0},
        {"cat": "user_annotation", "ts": 0.0, "dur": 500.0},
        {"name": "no category"},
    ]
    figures = idle.figures_of(idle.kernel_intervals(events))
    assert (figures["value"], figures["all_gaps_per_cent"], figures["kernels"]) == (10.0, 13.0, 4)
    with pytest.raises(RuntimeError, match="no kernel"):
        idle.figures_of([])


def test_a_pass_counts_tokens_per_second() -> None:
    assert GpuPass(2.0, 10, 0.5).tokens_per_second == 5.0


@pytest.mark.proof
def test_a_row_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(bench.RESULTS.iterdir())
    assert bench.main(["--device", "cpu", "--rows", "idle", "--out", str(tmp_path)]) == 1
    assert sorted(bench.RESULTS.iterdir()) == before
    report = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert report["comparable"] is False
    assert report["rows"]["idle"]["failed"] == "it needs a GPU: a trace of a CPU has no device in it"
    text = (tmp_path / "gpu-cpu.md").read_text()
    assert text in capsys.readouterr().out
    assert (
        "| device idle between decode steps, 0.6B, 256 rows | ≤ 5 % of the step | ≤ 2 % of the step | failed | | |"
        in text
    )


def bench_gpu(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command on a machine whose GPUs are hidden."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "BENCHMARK_CACHE": str(cache)}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.proof
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    before = sorted(bench.RESULTS.iterdir())
    process = bench_gpu(tmp_path)
    out, said = process.communicate()
    assert (process.returncode, out, said.count("\n")) == (2, "", 1)
    assert re.match("bench-gpu: the device is cuda, but .*; .* or choose the device cpu$", said)
    assert sorted(bench.RESULTS.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_ended_by_a_signal_it_takes_its_scratch_folder_along(tmp_path: Path) -> None:
    # All rows, which take far longer than this test
    with bench_gpu(tmp_path, "--device", "cpu") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("card: ")
        assert [folder.name[:10] for folder in tmp_path.iterdir()] == ["gpu-bench-"]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_takes_too_long_is_given_up(setting: Setting) -> None:
    assert bench._in_a_process("card", setting, 0.01) == {"failed": "it took longer than 0 s"}


def test_the_table_says_what_falls_short() -> None:
    outcomes = {
        "qwen3-0.6b": {"value": 24_000.0, "bound": 36_000.0, "how": "so"},
        "decode-attention": {"value": 3600.0, "bound": 4000.0, "how": "so"},
        "idle": {"value": 1.5, "how": "so"},
        "start-up": {"failed": "no disk"},
    }
    lines = table(outcomes).splitlines()
    goals = "68 % of the bound | 82 % of the bound"
    assert lines[2] == f"| Qwen3-0.6B, bf16 | {goals} | 24,000 tok/s (short) | 36,000 tok/s | 66.7 % |"
    assert lines[3].endswith("| 80 % of the bound | 90 % of the bound | 3,600 GB/s | 4,000 GB/s | 90.0 % |")
    assert lines[4].endswith("| 1.5 % of the step | – |  |")
    assert "not measured: no disk" in notes(outcomes)
    assert ROWS["qwen3-8b"].met({"value": 1.0}) is None


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_row_but_those_that_need_a_gpu(tmp_path: Path) -> None:
    assert bench.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    outcomes = json.loads((tmp_path / "gpu-cpu.json").read_text())["rows"]
    assert [name for name, outcome in outcomes.items() if "value" not in outcome] == ["idle", "qwen3-0.6b-fp8"]
    assert list(outcomes) == list(ROWS)
