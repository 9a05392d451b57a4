"""That the benchmarks of `make bench` run, that their arithmetic is right, and that pages quote
what the results say.
"""

import importlib
import json
import os
import platform
import random
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks import goals, models, pages, peak, peers, plot, report, rows, step_profile
from benchmarks.gguf import encode_tensor, write_gguf
from benchmarks.measured import measured_processors
from benchmarks.processor import AVX2, AVX512, AVX512_BF16, Processor, this_processor
from benchmarks.profile_table import PARTS, profile_table
from benchmarks.schemas import any_schema, schema_of_fields
from benchmarks.work import shape_of, share_of
from tests.benchmarks.stored_results import DATE, store_result

BESIDE_ROWS = {
    "admission",
    "embeddings",
    "embeddings_memory",
    "peak",
    "goals",
    "fleet",
    "pages",
    "redis_time",
    "queue_latency",
    "__main__",
}
MODULES = sorted({row[0] for row in rows.QUICK + rows.FULL} | BESIDE_ROWS)


def test_pages_quote_the_committed_results() -> None:
    for path, text in pages.pages().items():
        assert (pages.ROOT / path).read_text() == text, (
            f"{path} is not what the results give: run python -m benchmarks.pages"
        )


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_says_what_it_does(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["benchmarks", "--full"],
        pytest.param(["benchmarks.engine", "--against", "vllm", "--model", "tiny"], marks=pytest.mark.proof),
    ],
)
def test_without_the_peer_one_sentence_says_so(arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PEERS": str(tmp_path / "peers"), "BENCHMARK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"there is no vLLM in {tmp_path}/peers/vllm: ")
    assert done.stderr.count("\n") == 1


def test_without_llama_cpp_one_sentence_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.alone", "--against", "llama.cpp", "--out", str(tmp_path)]
    environment = {**os.environ, "PEERS": str(tmp_path / "peers"), "BENCHMARK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"there is no llama.cpp in {tmp_path}/peers/llama: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.proof
@pytest.mark.parametrize(
    ("engine", "peer", "llama_cpp"), [("float32", "float32", "float16"), ("bfloat16", "bfloat16", "bfloat16")]
)
def test_peers_run_in_the_dtype_that_suits_the_processor(
    engine: str, peer: str, llama_cpp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "vllm").touch()
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setenv("BENCHMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "engine_dtype", lambda: engine)
    command = peers.vllm_run_batch(tmp_path / "input.jsonl", tmp_path / "results.jsonl", "tiny")
    assert command[command.index("--dtype") + 1] == peer
    assert peers.gguf_dtype() == llama_cpp


def test_the_rest_of_the_table_is_measured_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--full", "--only", "alone", "--out", str(tmp_path)])
    monkeypatch.setattr(subprocess, "run", lambda command: ran.append(command) or SimpleNamespace(returncode=0))
    assert importlib.import_module("benchmarks.__main__").main() == 0
    assert len(ran) == 1
    assert "--against" not in ran[0]
    assert "its row is left out" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "number"), [("float16", 1), ("bfloat16", 30)])
def test_a_gguf_file_has_every_weight_as_llama_cpp_reads_it(dtype: str, number: int, tmp_path: Path) -> None:
    """Read back by the format's description: names, shapes with the inner dimension first, and a
    projection turned round.
    """
    torch.manual_seed(0)
    weights = {
        "transformer.wte.weight": torch.randn(5, 8).bfloat16(),
        "transformer.h.0.ln_1.bias": torch.randn(8).bfloat16(),
        "transformer.h.0.attn.c_attn.weight": torch.randn(8, 24).bfloat16(),
    }
    save_file(weights, tmp_path / "model.safetensors")
    config = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "layer_norm_epsilon": 1e-5, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"b": 1, "a": 0, "ab": 2}, "merges": [["a", "b"]]}})
    )
    write_gguf(tmp_path, tmp_path / "model.gguf", dtype)
    content = (tmp_path / "model.gguf").read_bytes()
    assert content[:24] == b"GGUF" + struct.pack("<IQQ", 3, 3, 11)
    at = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    assert struct.unpack_from("<IIQ", content, at) == (9, 8, 5)

    def tensor(name: str, dimensions: int) -> tuple[tuple[int, ...], int, int]:
        *shape, kind, offset = struct.unpack_from(
            f"<{dimensions}QIQ", content, content.index(name.encode()) + len(name) + 4
        )
        return tuple(shape), kind, offset

    data = len(content) - sum(-(-size // 32) * 32 for size in (5 * 8 * 2, 8 * 4, 8 * 24 * 2))
    assert tensor("token_embd.weight", 2)[:2] == ((8, 5), number)
    assert tensor("blk.0.attn_norm.bias", 1)[:2] == ((8,), 0)
    shape, kind, offset = tensor("blk.0.attn_qkv.weight", 2)
    assert (shape, kind) == ((8, 24), number)
    stored = torch.frombuffer(bytearray(content[data + offset : data + offset + 384]), dtype=getattr(torch, dtype))
    assert torch.equal(stored.view(24, 8), weights["transformer.h.0.attn.c_attn.weight"].T.to(stored.dtype))


def test_blocks_of_q8_0_hold_their_scale_and_their_numbers(tmp_path: Path) -> None:
    """By the format's description: a float16, then 32 int8 of the same row."""
    torch.manual_seed(0)
    weight = torch.randn(3, 64).bfloat16()
    data = bytearray(encode_tensor("transformer.wte.weight", weight, "q8_0").data)
    assert len(data) == 3 * 2 * 34
    for number in range(6):
        scale, *whole = struct.unpack_from("<e32b", data, 34 * number)
        block = weight.view(-1, 32)[number].float()
        assert (torch.tensor(whole) * scale - block).abs().max() <= 0.6 * scale
        assert max(map(abs, whole)) == 127
    assert encode_tensor("transformer.wpe.weight", weight, "q8_0").kind == "float32"


def test_the_work_of_a_pass_by_hand() -> None:
    """llama's `tiny`: two layers of 64 x 64 for queries and output, 64 x 32 for keys and for
    values, three of 64 x 128.
    """
    shape = shape_of("tiny")
    assert shape.layer_weights == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert (shape.head_weights, shape.kv_bytes_per_token) == (64 * 32_000, 2 * 2 * 32 * 2)
    assert shape.operations(10, 3) == 2 * (10 * shape.layer_weights + 3 * shape.head_weights)
    figures = {"computed_tokens": 10, "output_tokens": 3, "seconds": 2.0}
    assert share_of(figures, shape.operations(10, 3), "tiny") == 0.5


def test_the_matrix_peak_leaves_out_products_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def rate(size: int, _: float) -> float:
        tried.append(size)
        return 1e9 * len(tried)

    monkeypatch.setattr(peak, "_product_rate", rate)
    assert peak.matrix_peak(0.1) == 1e9  # where the second size takes 7 s
    assert peak.matrix_peak(1000.0) == 5e9
    assert tried == [1024, 1024, 1536, 2048, 3072]


def test_real_shapes_have_their_weights() -> None:
    gpt2 = shape_of("gpt2-124m")
    assert round((gpt2.layer_weights + gpt2.head_weights) / 1e6) == 110
    assert round(shape_of("llama-135m").layer_weights / 1e6) == 106
    assert round(shape_of("qwen3-0.6b").layer_weights / 1e6) == 440


def test_a_vocabulary_is_filled_up_with_words_that_are_made_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bpe = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}, [("a", "b"), ("b", "a"), ("ab", "a")]))
    full = Tokenizer.from_str(models.filled_up(bpe.to_str(), 8))
    assert full.get_vocab_size() == 8
    assert sorted(full.get_vocab().items(), key=itemgetter(1))[5:] == [("abba", 5), ("baaba", 6), ("ababa", 7)]


def test_every_byte_of_a_vocabulary_has_a_letter() -> None:
    letters = models.bytes_by_letter()
    assert sorted(letters) == sorted(ByteLevel.alphabet())
    assert sorted(letters.values()) == list(range(256))
    text = "Größe\n\t1"
    ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(letters[letter] for letter in spelled) == text.encode()


def test_schemas_are_valid_different_and_the_same_each_time() -> None:
    drawn = [[json.dumps(any_schema(draw)) for _ in range(50)] for draw in (random.Random(3), random.Random(3))]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 50
    for schema in map(json.loads, drawn[0]):
        Draft202012Validator.check_schema(schema)
    assert len(schema_of_fields(random.Random(1), 20)["required"]) == 20


@dataclass
class Timed:
    """As torch's profiler gives them; times in microseconds."""

    name: str
    microseconds: float
    cpu_children: list["Timed"] = field(default_factory=list)

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(elapsed_us=lambda: self.microseconds)


def test_the_parts_of_a_step_add_up() -> None:
    forward = Timed(
        "forward",
        60,
        [
            Timed("native::packed_matmul", 30),
            Timed("part: attention", 12, [Timed("aten::matmul", 7, [Timed("aten::mm", 6)]), Timed("aten::add", 1)]),
            Timed("aten::add", 5),
        ],
    )
    sample = Timed("sample", 20, [Timed("aten::linear", 9), Timed("aten::argmax", 4)])
    step = Timed(
        "one step",
        100,
        [Timed("schedule", 5), Timed("inputs", 6, [Timed("aten::copy_", 2)]), forward, sample],
    )
    parts = {name: round(1e6 * seconds) for name, seconds in step_profile.parts_of(step).items()}
    expected = {"matrix": 39, "attention": 8, "norms and elementwise": 5, "sampling": 4, "inputs": 2, "python": 42}
    assert parts == expected
    assert tuple(expected) == PARTS


def test_a_call_of_all_layers_reports_its_parts() -> None:
    step = Timed("one step", 100, [Timed("forward", 70, [Timed("native::run_stack", 60)])])
    layers = {"matrix": 40e-6, "attention": 15e-6}
    parts = {name: round(1e6 * seconds) for name, seconds in step_profile.parts_of(step, layers=layers).items()}
    assert parts == {"matrix": 40, "attention": 15, "python": 45}


def test_the_profile_as_a_table() -> None:
    parts = {part: {"ms": 10.0, "share": 0.1} for part in PARTS} | {
        "matrix": {"ms": 50.0, "share": 0.5, "bound_ms": 40.0}
    }
    kind = {"step_ms": 100.0, "tokens": 2048, "parts": parts}
    figures = {"rows": 64, "context": 256, "decode": kind, "prefill": kind, "queue": {"processor_ms_per_step": 3.0}}
    lines = profile_table(figures).splitlines()
    assert lines[0].startswith("| ms | matrix | attention |")
    times = "50.0 (40.0) | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 100.0"
    assert lines[2] == f"| decode, 64 rows at 256 tokens | {times} | 3.0 |"
    assert lines[3] == f"| prompts, 2,048 tokens | {times} |  |"


def store_ratio(results: Path, ratio: float, instructions: str, date: str = DATE) -> None:
    """Store how the engine fared against vLLM with 64 random prompts."""
    figures = {
        "ratio": ratio,
        "peak_share": 0.7,
        "matrix_peak_gflops": 400.0,
        "engine": {"output_tokens_per_second": 1000 * ratio},
        "vllm": {"output_tokens_per_second": 1000.0},
    }
    store_result(results, goals.AGAINST_VLLM[0].file, figures, instructions, date)


FIRST = "| engine, 64 random prompts, against vLLM | AMD EPYC"


def test_the_table_says_what_falls_short(tmp_path: Path) -> None:
    store_ratio(tmp_path, 1.25, AVX512_BF16)
    row = f"{FIRST} (AVX512-BF16) | 1.30x / 1.50x |"
    assert rows_of(tmp_path)[0] == f"{row} 1.25x (short): 1250 against 1000 tok/s, 2026-01-02 |"
    store_ratio(tmp_path, 1.31, AVX512_BF16, "2026-01-03")
    assert rows_of(tmp_path)[0] == f"{row} 1.31x: 1310 against 1000 tok/s, 2026-01-03 |"


def test_each_processor_has_rows_for_what_was_measured_on_it(tmp_path: Path) -> None:
    store_ratio(tmp_path, 1.25, AVX512_BF16)
    store_ratio(tmp_path, 1.25, AVX512, "2026-01-03")
    store_ratio(tmp_path, 1.25, AVX2)
    store_result(tmp_path, "alone-gpt2-124m", {"ratio": 0.9}, AVX2)
    first, second, third, *shares = rows_of(tmp_path)
    assert first == f"{FIRST} (AVX-512) | 1.25x / 1.50x | 1.25x: 1250 against 1000 tok/s, 2026-01-03 |"
    assert second == "|  | AMD EPYC (AVX2) |  | 1.25x: 1250 against 1000 tok/s, 2026-01-02 |"
    assert third.startswith("|  | AMD EPYC (AVX512-BF16) | 1.30x / 1.50x | 1.25x (short): ")
    assert len(shares) == 3, "one processor alone has a goal for the figure measured elsewhere"


def rows_of(results: Path) -> list[str]:
    return goals.table(results).splitlines()[2:]


def test_a_page_has_processors_side_by_side(tmp_path: Path) -> None:
    step = {"model": "tiny", "context": 128, "rows": 1, "tokens_per_second": 1200.0, "share_of_bound": 0.5}
    for instructions, date in ((AVX2, "2026-01-02"), (AVX512_BF16, "2026-01-03")):
        store_result(tmp_path, "batch-sizes", {"steps": [step]}, instructions, date)
    performance = pages.pages(tmp_path)[pages.PERFORMANCE]
    sizes = performance.partition("<!-- batch-sizes:")[2].partition("<!-- end of batch-sizes -->")[0]
    assert sizes.strip().splitlines()[2:] == [
        "| processor | tok/s (of the bound) | 1 row |",
        "| --- | --- | --- |",
        "| AMD EPYC (AVX2), 2026-01-02 | `tiny`, context 128 | 1,200 (50 %) |",
        "| AMD EPYC (AVX512-BF16), 2026-01-03 | `tiny`, context 128 | 1,200 (50 %) |",
    ]
    assert performance.count(pages.NOT_MEASURED) == 5


def test_a_result_leaves_those_of_other_processors(tmp_path: Path) -> None:
    store_ratio(tmp_path, 1.25, "SSE2")
    before = next(tmp_path.glob("*/*.json")).read_text()
    written = report.write_report(goals.AGAINST_VLLM[0].file, {"ratio": 2.0}, tmp_path)
    assert written.parent == tmp_path / this_processor().folder
    assert next(tmp_path.glob("amd-epyc-sse2/*.json")).read_text() == before
    found = {one.processor: one.result(written.stem) for one in measured_processors(tmp_path)}
    stored = found[this_processor()]
    assert stored is not None
    assert stored.figures == {"ratio": 2.0}
    assert found[Processor("AMD EPYC", "SSE2")] is not None


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "folder"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fma avx2\n", Processor("AMD EPYC", AVX2), "amd-epyc-avx2"),
        (
            "model name\t: AMD EPYC\nflags\t\t: avx2 avx512f avx512_bf16\n\nmodel name\t: another\n",
            Processor("AMD EPYC", AVX512_BF16),
            "amd-epyc-avx512-bf16",
        ),
        (
            "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512_bf16\n",
            Processor("AMD EPYC Zen 5", AVX512_BF16),
            "amd-epyc-zen-5-avx512-bf16",
        ),
        ("Features\t: fp asimd bf16\n", Processor(platform.machine(), "NEON-BF16"), f"{platform.machine()}-neon-bf16"),
    ],
)
def test_a_processor_is_named_with_its_instructions(
    cpuinfo: str, processor: Processor, folder: str, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert this_processor(tmp_path / "cpuinfo") == processor
    assert processor.folder == folder.replace("_", "-")


def test_the_plot_has_a_bar_for_each_comparison(tmp_path: Path) -> None:
    assert plot.plot(tmp_path).count("<rect") == 0
    store_ratio(tmp_path, 1.25, AVX512_BF16)
    drawn = plot.plot(tmp_path)
    assert drawn.count("<rect") == 1
    assert 'class="short"' in drawn
    assert "1.25x  (1250 against 1000 tok/s)" in drawn
    store_ratio(tmp_path, 1.25, AVX2)
    drawn = plot.plot(tmp_path)
    assert (drawn.count('class="short"'), drawn.count('class="bar"')) == (1, 1)
    assert "AMD EPYC (AVX2), 2026-01-02" in drawn


@pytest.mark.proof
@pytest.mark.parametrize(
    "row",
    [
        ["alone", "--requests", "1"],
        ["engine", "--requests", "3", "--turns", "1"],
        ["families", "--turns", "1"],
        ["int8", "--turns", "1", "--divergence-of", "tiny"],
        ["int4", "--turns", "1"],
        ["step_profile", "--lines", "4"],
        ["run_batch", "--requests", "4", "--turns", "1"],
        ["queue_cost", "--requests", "4", "--turns", "1"],
        ["start_up", "--turns", "1"],
        ["structured_outputs", "--turns", "1", "--single-turns", "1", "--schemas", "2"],
    ],
    ids=lambda row: row[0],
)
def test_every_row_runs_on_a_tiny_model(row: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{row[0]}", *row[1:], "--model", "tiny", "--out", str(tmp_path)]
    environment = {**os.environ, "BENCHMARK_CACHE": str(tmp_path / "cache")}
    subprocess.run(command, env=environment, check=True, timeout=280)
    (written,) = tmp_path.glob("*/*.json")
    assert set(json.loads(written.read_text())) == {"benchmark", "date", "machine", "versions", "seed", "figures"}


@pytest.mark.proof
def test_every_scenario_of_the_control_plane_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.control_plane", "--scale", "0.01", "--publish", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=280)
    figures = {path.stem: json.loads(path.read_text())["figures"] for path in tmp_path.glob("*/*.json")}
    scenarios = ("lines", "batches", "behind", "open", "file", "large", "million")
    assert set(figures) == {f"control-plane-{name}" for name in scenarios}
    assert figures["control-plane-lines"]["lines"] == 500
    assert figures["control-plane-open"]["lines"] == 500
    assert figures["control-plane-file"]["lines"] == 3000
    assert figures["control-plane-large"]["lines"] == 1000
    assert 0 < figures["control-plane-large"]["first_claim"] < figures["control-plane-large"]["seconds"]
    assert figures["control-plane-million"]["lines"] == 10_000
    assert figures["control-plane-batches"]["batches"] == 10
    assert {"rq workers", "ticker", "Redis"} <= set(figures["control-plane-file"]["processor_us_per_line"])
