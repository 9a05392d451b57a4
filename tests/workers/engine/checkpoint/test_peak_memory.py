"""Loading holds at most the finished weights and one layer more.

The process's own memory is counted (RssAnon), without pages of the checkpoint's files: they are
page cache, which the system takes back at will.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.commands import REPOSITORY
from tests.workers.engine.native.available import needs_native

HIDDEN, WIDTH, LAYERS, VOCAB, GROUP = 2048, 6144, 3, 8192, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
MATRICES = {
    **{f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"},
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
LAYER = sum(rows * columns for rows, columns in MATRICES.values())  # numbers
LOAD = """
import sys
import torch
from workers.engine.backends.registry import find_backend
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.layers.int8_ops import Int8Ops
folder, quantization = sys.argv[1], sys.argv[2] or None
ops = find_backend("cpu").ops
for bits in (4, 8):
    ops.multiplies(bits, torch.float32)
torch.set_num_threads(1)
ops.linear(torch.ones(64, 64), None)(torch.ones(1, 64))
checkpoint = open_checkpoint(folder)
print(weight_bytes(checkpoint, torch.float32, True, quantization, integers=True), flush=True)
sys.stdin.readline()
model = load_weights(checkpoint, torch.float32, torch.device("cpu"), 64, Int8Ops(ops) if quantization else ops)
print("loaded", flush=True)
"""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gptq_parts(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    groups = columns // GROUP
    words = random(max(columns // 8, groups), rows).view(torch.int32)
    return {
        f"{name}.qweight": words[: columns // 8].clone(),
        f"{name}.qzeros": words[:groups, : rows // 8].clone(),
        f"{name}.scales": random(groups, rows).half(),
    }


def write(folder: Path, kind: str) -> Path:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN).to(dtype),
        "lm_head.weight": random(VOCAB, HIDDEN).to(dtype),
        "model.norm.weight": torch.ones(HIDDEN, dtype=dtype),
    }
    for layer in range(LAYERS):
        for norm in ("input", "post_attention"):
            tensors[f"model.layers.{layer}.{norm}_layernorm.weight"] = torch.ones(HIDDEN, dtype=dtype)
        for matrix, (rows, columns) in MATRICES.items():
            name = f"model.layers.{layer}.{matrix}"
            plain = {f"{name}.weight": random(rows, columns).to(dtype)} if kind != "gptq" else {}
            tensors |= plain or gptq_parts(name, rows, columns)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP} if kind == "gptq" else None
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    return folder


def own_memory(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else int(found[1]) << 10


@needs_native
@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "quantization", "layer"),
    [
        ("bfloat16", "", 2 * LAYER),
        ("float32", "", 4 * LAYER),
        ("bfloat16", "int8", LAYER),
        ("gptq", "", LAYER // 2),
    ],
)
def test_loading_holds_the_finished_weights_and_one_layer_more(
    kind: str, quantization: str, layer: int, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", LOAD, write(tmp_path, kind), quantization]
    with subprocess.Popen(
        arguments, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        finished, before = int(process.stdout.readline()), own_memory(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        peak = 0
        while process.poll() is None:
            peak = max(peak, own_memory(process.pid))
        assert process.stdout.read() == "loaded\n"
    print(f"{kind} {quantization}: {finished >> 20} MiB, {peak - before - finished >> 20} more at the peak")
    assert 0.9 * finished < peak - before <= finished + layer
