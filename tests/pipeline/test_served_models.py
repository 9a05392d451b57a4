"""What --model and --model-flags make of it, and what a model needs of the machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

from pipeline.commands.serve import serve
from pipeline.hosting import needs, room
from pipeline.hosting.host import check_fits, most_cache_bytes, sized_alone
from pipeline.hosting.models import ServedModel, served_models
from pipeline.hosting.needs import Needs, needs_of
from pipeline.hosting.room import Room
from pipeline.hosting.settings import HostingSettings
from pipeline.hosting.usage import memory_of
from pipeline.main import cli
from pipeline.options import all_models
from tests.pipeline.conftest import RunHere
from workers.engine.messages.config import EngineConfig
from workers.settings import DEMO_MODEL

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two models, and of something else."""
    for name in ("chat", "embed"):
        shutil.copytree(DEMO_MODEL, tmp_path / "models" / name)
    (tmp_path / "models" / "notes").mkdir()
    return tmp_path / "models"


def move(folder: Path) -> None:
    """Make the folder a third model, from a cache of the hub that was moved without its blobs."""
    shutil.copytree(folder / "chat", folder / "moved")
    (folder / "moved" / "model.safetensors").unlink()
    (folder / "moved" / "model.safetensors").symlink_to("../../blobs/ab")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "a={}/chat", "--model", "a={}/embed"), "two models are called a, {}/chat and {}/embed: give"),
        (("--model", "{}", "--served-model-name", "x"), "--served-model-name names one model, and there are several"),
        (
            ("--model", "{}", "--model-flags", "other=--dtype float32"),
            "other=...: no model is called so; there are: chat",
        ),
        (("--model", "{}", "--model-flags", "chat=--no-such"), "--model-flags chat: No such option '--no-such'"),
        (("--model", "{}", "--model-flags", "chat=--max-num-seqs 0"), "--model-flags chat: Invalid value"),
        (("--model", "{}", "--model-flags", "chat"), "'chat' is not NAME=FLAGS"),
        (
            ("--model", "{}", "--model-flags", "chat=--max-num-seqs 9 --max-num-batched-tokens 8"),
            "--max-num-batched-tokens 8 is below --max-num-seqs 9",
        ),
        (("{}/chat", "--model", "{}/embed"), "two models are named: {}/chat and --model {}/embed"),
        (("--model", "a={}/absent", "--model", "{}/chat"), "there is no model folder {}/absent"),
        (
            ("--model", "{}/moved", "--model", "{}/chat"),
            "{}/moved/model.safetensors is a link to ../../blobs/ab, which",
        ),
        (("{}/moved",), "{}/moved/model.safetensors is a link to ../../blobs/ab, which is not there: download"),
        (("--model", "a=", "--model", "{}/chat"), "--model a= gives a no folder"),
        (("--model", "{}/notes", "--model", "{}/chat"), "the folder {}/notes has no config.json"),
        (("{}/notes",), "the folder {}/notes has no config.json, and neither has a folder in it"),
        (
            ("--model", "{}", "--max-memory", "200M"),
            "the model chat needs about 0.76 GiB of memory, and of the 0.20 GiB",
        ),
        (("{}/chat", "--max-memory", "200M"), "the model chat needs about 0.76 GiB of memory, and of the 0.20 GiB"),
        (("{}/chat", "--idle-unload", "0"), "Invalid value for '--idle-unload'"),
    ],
)
def test_models_that_cannot_be_served_are_refused_in_one_sentence(
    run_here: RunHere, folder: Path, flags: tuple[str, ...], sentence: str
) -> None:
    shared = ("--port", 0, "--file-store", folder.parent / "store", "--device", "cpu", "--dtype", "float32")
    move(folder)
    done = run_here("serve", *(flag.replace("{}", str(folder)) for flag in flags), *shared)
    assert done.code == 2
    assert sentence.replace("{}", str(folder)) in done.err.splitlines()[-1]


def models_of(*arguments: object) -> list[ServedModel]:
    """Those that `pipeline serve` takes from its flags, variables and config file."""
    ctx = serve.make_context("serve", [*map(str, arguments), "--device", "cpu"], parent=click.Context(cli))
    given = all_models(ctx, ctx.params["model"], ctx.params["model_option"])
    return served_models(given, ctx.params["model_flags"], None, ctx.params)


def test_models_are_named_by_flags_a_variable_a_config_file_or_their_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, embed = folder / "chat", folder / "embed"
    expected = [[str(chat), "chat"], [str(embed), "embed"]]
    assert [model.names for model in models_of(folder)] == expected
    assert [model.listed_names for model in models_of(folder)] == [["chat"], ["embed"]]
    assert [model.names for model in models_of("--model", chat, "--model", embed)] == expected
    assert [model.names for model in models_of("--model", f"a={chat}", "--model", embed)] == [["a"], expected[1]]
    config = tmp_path / "config.yaml"
    config.write_text(f"model: [{chat}, {embed}]\nmodel-flags: 'embed=--max-num-seqs 3'\n")
    models = models_of("--config", config)
    assert [model.names for model in models] == expected
    assert [model.settings.engine.max_num_seqs for model in models] == [None, 3]
    assert "--max-num-seqs" in models[1].arguments
    config.write_text(f"model: {chat}\n")
    assert [model.names for model in models_of("--config", config)] == expected[:1]
    monkeypatch.setenv("PIPELINE_MODEL", f"{chat}:{embed}")
    assert [model.names for model in models_of()] == expected
    monkeypatch.delenv("PIPELINE_MODEL")
    assert [model.names for model in models_of()] == [["demo"]]
    assert [model.listed_names for model in models_of("--model", f"a={chat}", "--model", DEMO_MODEL)] == [
        ["a"],
        ["demo"],
    ]


def test_a_folder_of_models_may_hold_one_with_broken_links(folder: Path) -> None:
    move(folder)
    models = models_of(folder, "--dtype", "float32")
    assert [model.title for model in models] == ["chat", "embed", "moved"]
    check_fits(models, HostingSettings(max_memory=4 * GIB))
    whole, broken = (needs_of(model.settings.engine, 1).memory for model in models[1:])
    assert whole - broken == 2 * (Path(DEMO_MODEL) / "model.safetensors").stat().st_size  # stored as bfloat16


def test_flags_that_are_given_twice_for_a_model_count_together(folder: Path) -> None:
    given = ("chat=--max-num-seqs 3 --max-model-len 64", "embed=--max-num-seqs 5", "chat=--max-model-len 32")
    flags = [word for text in given for word in ("--model-flags", text)]
    engines = [model.settings.engine for model in models_of(folder, *flags)]
    assert [(engine.max_num_seqs, engine.max_model_len) for engine in engines] == [(3, 32), (5, None)]


def test_a_model_needs_its_weights_its_cache_and_its_processes() -> None:
    def memory(**changes: object) -> int:
        return needs_of(EngineConfig(model=DEMO_MODEL, device="cpu", **changes), 1).memory  # type: ignore[arg-type]

    cache = {"kv_cache_memory_bytes": GIB}
    weights = (Path(DEMO_MODEL) / "model.safetensors").stat().st_size
    assert memory(dtype="float32", **cache) - memory(dtype="bfloat16", **cache) == weights  # stored as bfloat16
    assert memory(dtype="float32", kv_cache_memory_bytes=2 * GIB) - memory(dtype="float32", **cache) == GIB
    assert memory(dtype="float32", max_num_seqs=64) > memory(dtype="float32", max_num_seqs=32)
    auto, narrow, wide = (
        memory(dtype=dtype, max_num_seqs=1) - memory(dtype=dtype, kv_cache_memory_bytes=1) + 1
        for dtype in ("auto", "bfloat16", "float32")
    )
    assert auto == narrow == wide // 2  # of a checkpoint in bfloat16
    two = needs_of(EngineConfig(model=DEMO_MODEL, device="cpu", dtype="float32"), 2)
    assert two.memory == 2 * memory(dtype="float32")
    assert needs_of(EngineConfig(model=DEMO_MODEL, device="cuda", tensor_parallel_size=2), 2).gpus == 4


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_a_model_is_weighed_in_the_type_that_it_is_computed_in(
    has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_has_bfloat16", lambda: has_bfloat16)

    def weights(stored: str) -> int:
        config = json.loads((Path(DEMO_MODEL) / "config.json").read_text()) | {"dtype": stored}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"weight": torch.zeros(1 << 20, dtype=getattr(torch, stored))}, tmp_path / "model.safetensors")
        engine = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_memory_bytes=GIB)
        return (needs_of(engine, 1).memory - GIB - needs._PROCESS_BYTES) >> 20

    assert weights("bfloat16") == (2 if has_bfloat16 else 4)
    assert weights("float16") == weights("float32") == 4


def test_a_model_in_a_folder_of_its_own_is_weighed(tmp_path: Path) -> None:
    modules = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "0_Transformer").symlink_to(DEMO_MODEL)
    inside, plain = (needs_of(EngineConfig(model=str(model), device="cpu"), 1) for model in (tmp_path, DEMO_MODEL))
    assert inside == plain


def test_a_quantized_model_needs_what_its_weights_become(tmp_path: Path) -> None:
    def memory(name: str, settings: dict[str, object], **tensors: torch.Tensor) -> int:
        config = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | settings))
        save_file(tensors, tmp_path / name / "model.safetensors")
        engine = EngineConfig(model=str(tmp_path / name), device="cpu", dtype="float32", kv_cache_memory_bytes=GIB)
        return needs_of(engine, 1).memory

    plain = memory("plain", {}, weight=torch.zeros((1024, 1024), dtype=torch.bfloat16))
    words, octets = torch.zeros((1024, 128), dtype=torch.int32), torch.zeros((1024, 1024), dtype=torch.int8)
    group = {"input_activations": {"num_bits": 2}, "weights": {"num_bits": 8}}
    quantized = (
        memory("gptq", {"quantization_config": {"bits": 4}}, qweight=words),
        memory("8-bits", {"quantization_config": {"bits": 8}}, qweight=torch.cat((words, words))),
        memory(
            "int8",
            {"compression_config": {"config_groups": {"one": group}}},
            weight=octets,
            mask=torch.zeros(8, dtype=torch.bool),
        ),
        memory("fp8", {"quantization_config": {"quant_method": "fp8"}}, weight=octets.to(torch.float8_e4m3fn)),
    )
    assert quantized == pytest.approx([plain] * 4, abs=1000)
    (tmp_path / "gptq" / "model.safetensors").write_bytes(b"torn")
    engine = EngineConfig(model=str(tmp_path / "gptq"), device="cpu", dtype="float32", kv_cache_memory_bytes=GIB)
    assert needs_of(engine, 1).memory == pytest.approx(plain - 4 * (1 << 20), abs=1000)


def test_the_models_of_a_server_divide_the_memory_of_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ("--dtype", "float32", "--max-num-seqs", 1 << 20)
    models = (
        models_of(folder / "chat", *many),
        models_of("--model", folder / "chat", "--model", folder / "embed", *many),
    )
    without = needs_of(models[0][0].settings.engine, 1, 0).memory
    for free in (100 * GIB, None, GIB):
        monkeypatch.setattr(room, "available_memory", lambda free=free: free)
        alone, both = (most_cache_bytes(some, Room(None)) for some in models)
        if free == 100 * GIB:
            assert alone == int(0.4 * (free - without))
            assert both == int(0.4 * (free - 2 * without)) // 2
        else:
            assert alone == both == GIB
    monkeypatch.setattr(room, "available_memory", lambda: 100 * GIB)
    assert most_cache_bytes(models[0], Room(10 * GIB)) == int(0.4 * (10 * GIB - without))


def test_a_hosted_model_gets_the_cache_that_it_was_weighed_with(folder: Path) -> None:
    (model,) = models_of(folder / "chat", "--dtype", "float32", "--max-num-seqs", 1 << 20)
    sized = model.sized(3 * GIB)
    assert sized.settings.engine.kv_cache_memory_bytes == 3 * GIB
    assert needs_of(sized.settings.engine, 1).memory == needs_of(model.settings.engine, 1, 3 * GIB).memory
    where = sized.arguments.index("--kv-cache-memory-bytes")
    assert sized.arguments[where + 1] == str(3 * GIB)
    assert "--gpu-memory-utilization" not in sized.arguments  # which contradicts it
    assert sized.sized(GIB) is sized
    assert sized_alone(model, HostingSettings()) is model
    assert sized_alone(model, HostingSettings(max_memory=4 * GIB)).settings.engine.kv_cache_memory_bytes


@pytest.mark.parametrize(
    "names", [("hidden_size", "num_attention_heads", "num_hidden_layers"), ("dim", "n_heads", "n_layers")]
)
def test_an_encoder_needs_a_cache_for_one_step(names: tuple[str, str, str], tmp_path: Path) -> None:
    shape = dict(zip(names, (768, 12, 6), strict=True))
    raw = {"architectures": ["BertModel"], "max_position_embeddings": 512, **shape}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def memory(**changes: int) -> int:
        return needs_of(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", **changes), 1).memory  # type: ignore[arg-type]

    token = 2 * 6 * 768 * 4
    assert memory() - memory(kv_cache_memory_bytes=1) == (1024 + (2 * 128 + 1) * 16) * token - 1
    longer = memory(max_num_batched_tokens=4096, max_num_seqs=8)
    assert longer - memory(kv_cache_memory_bytes=1) == (4096 + (2 * 8 + 1) * 16) * token - 1


def test_what_is_loaded_may_still_load_or_leaves_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Needs(GIB)
    machine = Room(None)
    monkeypatch.setattr(room, "available_memory", lambda: int(1.5 * GIB))
    assert machine.shortage(one, loaded=[one], starting=[], leaving=[]) == ""
    assert "1.00 GiB of memory, and 0.50 GiB are available" in machine.shortage(one, [one], [one], [])
    assert machine.shortage(one, [one], [one], leaving=[one]) == ""
    monkeypatch.setattr(room, "available_memory", lambda: None)
    assert machine.shortage(one, [one], [one], []) == ""
    limited = Room(2 * GIB)
    assert limited.shortage(one, [one], [], []) == ""
    assert "of the 2.00 GiB of --max-memory 0.00 GiB are left" in limited.shortage(one, [one], [one], [])
    assert limited.shortage(one, [one], [one], leaving=[one]) == ""


def test_a_loaded_model_counts_by_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    one, more, less = Needs(2 * GIB), Needs(GIB, used=3 * GIB), Needs(3 * GIB, used=GIB)
    machine, limited = Room(None), Room(5 * GIB)
    monkeypatch.setattr(room, "available_memory", lambda: 4 * GIB)
    assert machine.shortage(one, [more], [], []) == ""
    assert machine.shortage(one, [less], [], []) == ""  # which may take 2 GiB more: its cache fills with work
    assert limited.shortage(one, [more], [], []) == ""
    assert "of --max-memory 1.00 GiB are left" in limited.shortage(one, [more, Needs(GIB)], [], [])
    monkeypatch.setattr(room, "available_memory", lambda: 3 * GIB)
    assert "1.00 GiB are available" in machine.shortage(one, [less], [], [])
    monkeypatch.setattr(room, "available_memory", lambda: GIB)
    assert machine.shortage(one, [more], [], leaving=[more]) == ""
    assert machine.shortage(one, [less], [], leaving=[less]) == ""


def test_the_memory_of_a_process_is_that_of_all_below_it() -> None:
    size = 64 << 20
    code = f"held = bytearray({size}); import sys; print('held', flush=True); sys.stdin.read()"
    command = ["sh", "-c", f'{sys.executable} -c "{code}"; true']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        used = memory_of([process.pid])
        process.stdin.close()
    assert used is not None
    assert size < used < 3 * size
    assert memory_of([process.pid]) is None


def test_each_model_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "count_gpus", lambda: 2)
    machine, one = Room(None), Needs(0, gpus=1)
    assert machine.shortage(one, [one], [], []) == ""
    assert machine.shortage(one, [one], [one], []) == "needs 1 GPU, and 0 of 2 are free"
    assert machine.shortage(one, [one], [one], leaving=[one]) == ""
