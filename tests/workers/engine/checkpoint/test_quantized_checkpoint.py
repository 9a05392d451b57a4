"""Quantized checkpoints are read as the matrices that they mean, bit for bit."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.workers.engine.checkpoint.quantizing import (
    Case,
    Parts,
    awq,
    change,
    compressed,
    edit,
    fp8,
    gptq,
    numbers,
    packed,
    with_activations,
    write,
)
from tests.workers.engine.checkpoint.test_loading import logits
from tests.workers.engine.loading import load_model
from tests.workers.engine.native.available import needs_native
from tests.workers.engine.native.rounding import RoundingOps
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint, shard_checkpoint
from workers.engine.checkpoint.pooling_loader import load_pooling_model
from workers.engine.checkpoint.quantized_checkpoint import find_format, plain_readers
from workers.engine.checkpoint.readers import weight_readers
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.quantized import stack_rows
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel
from workers.engine.native.ops import NativeOps

CPU = torch.device("cpu")
CASES = {
    "gptq-4-32": gptq(4, 32),
    "gptq-4-128-act-order": gptq(4, 128, act_order=True),
    "gptq-4-32-act-order-asymmetric": gptq(4, 32, act_order=True, sym=False),
    "gptq-4-rows": gptq(4, -1, sym=False),
    "gptq-8-32-v2": gptq(8, 32, sym=False, v2=True),
    "gptq-8-32": gptq(8, 32),
    "gptq-8-48": gptq(8, 48, sym=False),
    "awq-32": awq(32),
    "awq-128": awq(128),
    "awq-rows": awq(-1),
    "fp8-blocks": fp8((32, 24)),
    "fp8-large-blocks": fp8((128, 128)),
    "fp8-matrix": fp8(None),
    "int-channel": numbers("channel"),
    "int-channel-asymmetric": numbers("channel", symmetric=False),
    "int-tensor": numbers("tensor"),
    "int-tensor-asymmetric": numbers("tensor", symmetric=False),
    "float-tensor": numbers("tensor", floats=True),
    "float-channel": numbers("channel", floats=True, stored="naive-quantized"),
    "float-block": numbers("block", floats=True),
    "float-channel-weights-only": with_activations(numbers("channel", floats=True), None),
    "packed-4-32": packed(4, 32),
    "packed-4-32-asymmetric": packed(4, 32, symmetric=False),
    "packed-4-32-act-order": packed(4, 32, act_order=True),
    "packed-4-128": packed(4, 128, symmetric=False, act_order=True),
    "packed-8-rows": packed(8, -1),
    "packed-8-rows-asymmetric": packed(8, -1, symmetric=False),
}
# With the bits of those that stay as they are stored
INTEGERS = {
    "gptq-4-32": 4,
    "gptq-4-rows": 4,
    "gptq-8-32": 8,
    "awq-32": 4,
    "awq-128": 4,
    "awq-rows": 4,
    "int-channel": 8,
    "int-tensor": 8,
    "packed-4-32": 4,
    "packed-4-32-asymmetric": 4,
    "packed-8-rows": 8,
}
Q_PROJ = "model.layers.1.self_attn.q_proj"


def with_scheme(case: Case, activation_scheme: str | None) -> Case:
    return dataclasses.replace(case, settings=case.settings | {"activation_scheme": activation_scheme})


def checkpoints(case: Case, path: Path, **settings: Any) -> tuple[Path, Path]:
    """Write a quantized checkpoint and the plain one that means the same."""
    found = write(case, path)
    if settings:
        edit(found[0] / "config.json", quantization_config=case.settings | settings)
    return found


def tensors(path: Path) -> Parts:
    return {name: read() for name, read in weight_readers(open_checkpoint(str(path))).items()}


@pytest.mark.parametrize("name", CASES)
def test_each_matrix_is_what_the_format_means(name: str, tmp_path: Path) -> None:
    quantized, plain = checkpoints(CASES[name], tmp_path)
    found, expected = tensors(quantized), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert found[tensor].dtype == CASES[name].dtype
        assert torch.equal(found[tensor], value), tensor
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 384), (32, 1032)])
def test_matrices_of_several_words_and_groups(name: str, n: int, k: int) -> None:
    found = CASES[name].pack(n, k, torch.Generator().manual_seed(4))
    assert torch.equal(read(CASES[name], found.parts), found.plain)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_words_that_are_not_full(bits: int, symmetric: bool) -> None:
    case = packed(bits, -1, symmetric=symmetric)
    found = case.pack(13, 37, torch.Generator().manual_seed(4))
    assert torch.equal(read(case, found.parts), found.plain)


def read(case: Case, parts: Parts) -> Tensor:
    """Return the matrix of one module that has those parts."""
    return reader_of(case, parts)()


def reader_of(case: Case, parts: Parts) -> Any:
    checkpoint_format = find_format({"quantization_config": case.settings})
    assert checkpoint_format is not None
    readers = {f"some.{part}": partial(lambda given: given, tensor) for part, tensor in parts.items()}
    return plain_readers(readers, checkpoint_format, case.dtype)["some.weight"]


@pytest.mark.parametrize("name", CASES)
def test_some_integers_stay_as_they_are_stored(name: str) -> None:
    case = CASES[name]
    found = case.pack(32, 1032, torch.Generator().manual_seed(4))
    stored, layout = reader_of(case, found.parts).quantized(), reader_of(case, found.parts).layout
    assert layout.bits == INTEGERS.get(name)
    if name not in INTEGERS:
        assert stored is None
        return
    weight = stored.rows(slice(0, 32))
    assert stored.rows(slice(5, 21)).dequantize().equal(found.plain[5:21])
    assert (weight.bits, weight.dequantize().equal(found.plain)) == (INTEGERS[name], True)
    rows, size = torch.tensor([3, 31, 0]), weight.group_size
    assert weight.rows(rows).dequantize().equal(found.plain[rows])
    assert weight.columns(0, 17).dequantize().equal(found.plain[:, :17])
    if size < 1032:
        for first in (size, size // 2):
            assert weight.columns(first, 3 * size).dequantize().equal(found.plain[:, first : 3 * size])
    both = stack_rows([weight, weight.rows(rows)])
    assert both is not None
    assert both.dequantize().equal(torch.cat((found.plain, found.plain[rows])))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (CASES["float-channel"], True),
        (CASES["float-tensor"], True),
        (CASES["float-channel-weights-only"], False),
        (with_activations(CASES["float-channel"], {"num_bits": 8, "type": "int"}), False),
        (with_activations(CASES["float-channel"], {"num_bits": 4, "type": "float"}), False),
        (fp8(None), True),
        (with_scheme(fp8(None), "static"), True),
        (with_scheme(fp8(None), None), False),
    ],
)
def test_inputs_are_in_float8_where_the_checkpoint_says_so(case: Case, expected: bool) -> None:
    weight = reader_of(case, case.pack(32, 64, torch.Generator().manual_seed(4)).parts).float8().rows(slice(0, 32))
    assert weight.float8_inputs == expected
    assert weight.rows(slice(0, 16)).float8_inputs == weight.columns(0, 16).float8_inputs == expected
    other = dataclasses.replace(weight, float8_inputs=not expected)
    assert stack_rows([weight, other]) is None


def check_near(model: DecoderModel, exact: DecoderModel) -> None:
    """A number between two integers may become either."""
    expected = logits(exact)
    assert (logits(model) - expected).norm() < 5e-4 * expected.norm()


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_the_cpu_multiplies_integers_as_they_are_stored(name: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(CASES[name], tmp_path)
    model: Any = load_model(str(quantized), "float32", CPU, ops=NativeOps())
    stored = {
        part.stored
        for layer in model.stack.layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
    }
    expected = {4: {torch.uint8}, 8: {torch.int8}, None: {torch.float16, torch.bfloat16}}[INTEGERS.get(name)]
    assert stored <= expected
    exact = load_model(str(quantized), "float32", CPU, ops=RoundingOps())
    check_near(model, exact)


@needs_native
def test_ranks_take_their_parts_of_integers(tmp_path: Path) -> None:
    quantized, plain = checkpoints(CASES["packed-4-32-asymmetric"], tmp_path)
    found: list[Tensor] = []
    for path, ops in ((quantized, NativeOps()), (plain, TorchOps())):
        shared = shard_checkpoint(open_checkpoint(str(path)), 2)
        ranks = [load_weights(shared, torch.float32, CPU, ops=ops, parallel=Parallel(rank, 2)) for rank in (0, 1)]
        found.append(torch.cat([weight.flatten() for model in ranks for weight in weights_of(model)]))
    torch.testing.assert_close(found[0], found[1], rtol=1 / 128, atol=1e-3)  # plain numbers were rounded to bfloat16


@needs_native
def test_projections_of_two_kinds_are_dequantized(tmp_path: Path) -> None:
    """Queries, keys and values are one product; of the second layer one matrix of them is plain."""
    case = packed(4, 32)
    settings = case.settings | {"ignore": ["lm_head", Q_PROJ]}
    quantized, _ = write(Case(settings, case.pack, case.dtype), tmp_path, (Q_PROJ,))
    model, exact = (load_model(str(quantized), "float32", CPU, ops=ops) for ops in (NativeOps(), RoundingOps()))
    layers: Any = model.stack.layers
    assert [layer.attention.qkv.stored for layer in layers] == [torch.uint8, torch.bfloat16, torch.uint8]
    check_near(model, exact)


def load(path: Path) -> DecoderModel:
    return load_model(str(path), "float32", CPU)


@pytest.mark.parametrize("name", ["gptq-4-32-act-order-asymmetric", "awq-32", "fp8-blocks", "packed-4-32-asymmetric"])
def test_ranks_take_their_parts(name: str, tmp_path: Path) -> None:
    models = []
    for path in checkpoints(CASES[name], tmp_path):
        shared = shard_checkpoint(open_checkpoint(str(path)), 2)
        models.append([load_weights(shared, torch.float32, CPU, parallel=Parallel(rank, 2)) for rank in (0, 1)])
    quantized, plain = ([weights_of(model) for model in ranks] for ranks in models)
    for rank in (0, 1):
        assert all(torch.equal(one, other) for one, other in zip(quantized[rank], plain[rank], strict=True))
    assert not torch.equal(quantized[0][0], quantized[1][0])


def weights_of(model: Any) -> list[Tensor]:
    """Return what a rank's projections give for each input alone, before the ranks' are summed."""
    found = []
    for layer in model.stack.layers:
        for projection in (layer.attention.qkv, layer.mlp.up):
            found.append(projection(torch.eye(64)))
        for projection, width in ((layer.attention.output, 32), (layer.mlp.down, 48)):
            found.append(projection._own(torch.eye(width)))
    return found


def test_models_that_pool_are_read(tmp_path: Path) -> None:
    hidden = []
    for path in checkpoints(CASES["packed-4-32-asymmetric"], tmp_path):
        checkpoint = open_checkpoint(str(path), task="embed")
        trunk: Any = load_pooling_model(checkpoint, torch.float32, CPU, 64, TorchOps())._trunk
        hidden.append(torch.cat([layer.attention.qkv(torch.eye(64)) for layer in trunk.stack.layers]))
    assert torch.equal(*hidden)


def test_ignored_modules_are_plain(tmp_path: Path) -> None:
    case = packed(4, 32)
    settings = case.settings | {"ignore": ["lm_head", Q_PROJ, "re:.*layers.0.*down_proj"]}
    kept = (Q_PROJ, "model.layers.0.mlp.down_proj")
    quantized, plain = write(Case(settings, case.pack, case.dtype), tmp_path, kept)
    assert torch.equal(logits(load(quantized)), logits(load(plain)))
    assert torch.equal(
        tensors(quantized)[f"{Q_PROJ}.weight"], load_file(plain / "model.safetensors")[f"{Q_PROJ}.weight"]
    )


def test_scales_of_ignored_modules_count_for_nothing(tmp_path: Path) -> None:
    case = numbers("channel")
    settings = case.settings | {"ignore": ["lm_head", Q_PROJ]}
    quantized, plain = write(Case(settings, case.pack, case.dtype), tmp_path, (Q_PROJ,))
    change(quantized, lambda stored: stored.update({f"{Q_PROJ}.weight_scale": torch.full((64, 1), 7.0)}))
    found = tensors(quantized)
    assert f"{Q_PROJ}.weight_scale" not in found
    assert torch.equal(found[f"{Q_PROJ}.weight"], load_file(plain / "model.safetensors")[f"{Q_PROJ}.weight"])


def test_each_group_has_its_own_scheme(tmp_path: Path) -> None:
    """Value projections are in a group by a pattern, one query projection by its name, the rest by
    class.
    """
    coarse, fine, row = packed(4, -1), packed(8, 32, symmetric=False), numbers("channel", floats=True)

    def scheme(case: Case, *targets: str) -> dict[str, Any]:
        return case.settings["config_groups"]["group_0"] | {"targets": targets, "format": case.settings["format"]}

    groups = {"a": scheme(coarse, "Linear"), "b": scheme(fine, "re:.*v_proj$"), "c": scheme(row, Q_PROJ)}
    settings = compressed("mixed-precision", {}, config_groups=groups)
    by_module: list[str] = []

    def names(stored: Parts) -> None:
        by_module.extend(sorted(name.removesuffix(".weight") for name in stored if name.endswith("_proj.weight")))

    quantized, plain = write(Case(settings, coarse.pack, torch.bfloat16), tmp_path)
    expected = load_file(plain / "model.safetensors")
    names(expected)
    generator = torch.Generator().manual_seed(9)

    def requantize(stored: Parts) -> None:
        for module in by_module:
            if not module.endswith("v_proj") and module != Q_PROJ:
                continue
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                del stored[f"{module}.{part}"]
            case = row if module == Q_PROJ else fine
            n, k = expected[f"{module}.weight"].shape
            found = case.pack(n, k, generator)
            stored.update({f"{module}.{part}": value for part, value in found.parts.items()})
            expected[f"{module}.weight"] = found.plain

    change(quantized, requantize)
    found = tensors(quantized)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_gptq_of_several_sizes_of_groups(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` changes the settings of modules by pattern."""
    case = gptq(8, 16, sym=False)
    dynamic = {"-:.*lm_head": {}, r"+:.*layers\.\d\..*": {"bits": 8, "group_size": 16}}
    quantized, plain = checkpoints(case, tmp_path, bits=4, group_size=128, dynamic=dynamic)
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


def test_the_first_dynamic_pattern_counts(tmp_path: Path) -> None:
    changes = {"bits": 8, "group_size": 16}
    dynamic = {r".*layers\.\d\..*": changes, ".*q_proj": {"bits": 4, "group_size": 8}, "-:.*lm_head": None}
    quantized, plain = checkpoints(gptq(8, 16, sym=False), tmp_path, bits=4, group_size=None, dynamic=dynamic)
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


def test_groups_for_embeddings_are_not_those_for_linear_layers(tmp_path: Path) -> None:
    case, rows = packed(4, 32, symmetric=False), numbers("channel")
    fine = rows.settings["config_groups"]["group_0"] | {"targets": ["Embedding"], "format": rows.settings["format"]}
    quantized, plain = checkpoints(case, tmp_path, config_groups=case.settings["config_groups"] | {"group_1": fine})
    name = "model.embed_tokens"
    expected = load_file(plain / "model.safetensors")[f"{name}.weight"]
    found = rows.pack(*expected.shape, torch.Generator().manual_seed(5))

    def requantize(stored: Parts) -> None:
        del stored[f"{name}.weight"]
        stored.update({f"{name}.{part}": value for part, value in found.parts.items()})

    change(quantized, requantize)
    assert torch.equal(tensors(quantized)[f"{name}.weight"], found.plain)


def test_the_first_key_of_compressed_tensors_is_read(tmp_path: Path) -> None:
    case = numbers("channel")
    quantized, plain = checkpoints(case, tmp_path)
    settings = {key: value for key, value in case.settings.items() if key != "quant_method"}
    edit(quantized / "config.json", quantization_config=None, compression_config=settings)
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


def test_columns_are_in_order_without_an_index(tmp_path: Path) -> None:
    quantized, plain = checkpoints(gptq(4, 32, sym=False), tmp_path)
    change(quantized, lambda stored: drop(stored, "g_idx"))
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


def test_columns_are_in_order_where_the_index_is_unset(tmp_path: Path) -> None:
    quantized, plain = checkpoints(packed(4, 32), tmp_path)
    unset = {f"{Q_PROJ}.weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    change(quantized, lambda stored: stored.update(unset))
    assert torch.equal(logits(load(quantized)), logits(load(plain)))


def drop(stored: Parts, part: str) -> None:
    for name in [name for name in stored if name.endswith(f".{part}")]:
        del stored[name]


def test_scales_of_the_cache_are_left_aside(tmp_path: Path) -> None:
    quantized, plain = checkpoints(numbers("tensor", floats=True), tmp_path, kv_cache_scheme={"num_bits": 8})
    change(quantized, lambda stored: stored.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    assert tensors(quantized).keys() == load_file(plain / "model.safetensors").keys()


def test_a_matrix_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    quantized, _ = checkpoints(gptq(4, 32), tmp_path)
    change(quantized, lambda stored: replace(stored, f"{Q_PROJ}.scales", lambda scales: scales[:, 1:]))
    readers = weight_readers(open_checkpoint(str(quantized)))
    readers["model.layers.0.self_attn.q_proj.weight"]()
    with pytest.raises(ModelLoadError, match=r"q_proj\.scales"):
        readers[f"{Q_PROJ}.weight"]()


def replace(stored: Parts, name: str, new: Callable[[Tensor], Tensor]) -> None:
    stored[name] = new(stored[name]).contiguous()


@pytest.mark.parametrize("name", ["gptq-4-32", "awq-32", "fp8-blocks", "int-channel", "packed-4-32", "packed-8-rows"])
def test_weights_are_counted_as_what_they_become(name: str, tmp_path: Path) -> None:
    quantized, plain = (open_checkpoint(str(path)) for path in checkpoints(CASES[name], tmp_path))
    for dtype in (torch.bfloat16, torch.float32):
        for settings in ({}, {"quantization": "int8"}):
            size, expected = (weight_bytes(checkpoint, dtype, **settings) for checkpoint in (quantized, plain))  # type: ignore[arg-type]
            assert size == pytest.approx(expected, rel=0.06)  # a plain file has a header, too
        as_stored = sum(file.stat().st_size for file in quantized.folder.glob("*.safetensors"))
        size = weight_bytes(quantized, dtype, widens=True, integers=True)
        assert size == pytest.approx(as_stored, rel=0.3) if name in INTEGERS else size > 1.5 * as_stored


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


INSTEAD = "use the model's float16, bfloat16 or float32 version"
UNKNOWN_SCALE = f"and how it is scaled is not known; {INSTEAD}"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"bits": 4}, "no known method"),
        (gptq(4, 32).settings | {"bits": "4"}, "gptq with bits '4'"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (gptq(4, 32).settings | {"bits": 3}, "gptq with bits 3"),
        (gptq(4, 32).settings | {"checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        (awq(32).settings | {"version": "gemv"}, "awq of the version 'gemv'"),
        (awq(32).settings | {"zero_point": False}, "awq without zero points"),
        (awq(32).settings | {"bits": 8}, "awq with bits 8"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "in the format 'nvfp4-pack-quantized'"),
        (compressed("float-quantized", {"num_bits": 4, "type": "float"}), "with 4 bits of the type 'float'"),
        (compressed("pack-quantized", {"num_bits": 3, "type": "int"}), "with 3 bits of the type 'int'"),
        (compressed("marlin-24", {"num_bits": 4, "type": "int"}), "in the format 'marlin-24'"),
        (
            compressed("int-quantized", {"num_bits": 8}, sparsity_config={"format": "sparse-24-bitmask"}),
            "with the sparse format 'sparse-24-bitmask'",
        ),
        (
            compressed("int-quantized", {"num_bits": 8}, transform_config={"config_groups": {"R1": {}}}),
            "with transforms of activations",
        ),
    ],
)
def test_other_methods_are_refused_by_name(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(gptq(4, 32), tmp_path)
    edit(quantized / "config.json", quantization_config=settings)
    message = refusal(quantized)
    assert why in message
    assert INSTEAD in message


def test_what_transformers_runs_is_refused(tmp_path: Path) -> None:
    quantized, _ = checkpoints(gptq(4, 32), tmp_path)
    for model_impl, task in (("transformers", "auto"), ("transformers", "embed")):
        with pytest.raises(ModelLoadError, match="is quantized, which is not supported for LlamaForCausalLM by"):
            open_checkpoint(str(quantized), model_impl, task)
    edit(quantized / "config.json", architectures=["MambaForCausalLM"])
    assert "is quantized, which is not supported for MambaForCausalLM by transformers' class" in refusal(quantized)


def test_matrices_that_are_stored_the_other_way_round_are_refused(tmp_path: Path) -> None:
    quantized, _ = checkpoints(gptq(4, 32), tmp_path)
    edit(quantized / "config.json", architectures=["GPT2LMHeadModel"])
    assert "is quantized, which is not supported for GPT2LMHeadModel" in refusal(quantized)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gptq-4-32", "scales"),
        ("gptq-4-32", "qzeros"),
        ("gptq-4-32", "qweight"),
        ("gptq-4-32-act-order-asymmetric", "g_idx"),
        ("awq-32", "scales"),
        ("fp8-blocks", "weight"),
        ("int-channel", "weight"),
        ("int-channel-asymmetric", "weight_zero_point"),
        ("packed-4-32", "weight_scale"),
        ("packed-4-32", "weight_shape"),
        ("packed-4-32", "weight_packed"),
        ("packed-4-32-asymmetric", "weight_zero_point"),
        ("packed-4-32-act-order", "weight_g_idx"),
    ],
)
def test_a_missing_part_is_named(name: str, part: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(CASES[name], tmp_path)
    change(quantized, lambda stored: drop(stored, f"1.self_attn.q_proj.{part}"))
    assert f"the checkpoint has no tensor '{Q_PROJ}.{part}'" in refusal(quantized)


@pytest.mark.parametrize(
    ("name", "part", "holds"),
    [("int-channel", "weight_scale", "int8"), ("fp8-blocks", "weight_scale_inv", "float8_e4m3fn")],
)
def test_small_numbers_without_scales_are_no_weights(name: str, part: str, holds: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(CASES[name], tmp_path)
    change(quantized, lambda stored: drop(stored, f"1.self_attn.q_proj.{part}"))
    assert refusal(quantized) == f"tensor '{Q_PROJ}.weight' holds {holds}, {UNKNOWN_SCALE}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_small_numbers_of_a_checkpoint_that_is_not_quantized_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    _, plain = checkpoints(CASES["int-channel"], tmp_path)
    change(plain, lambda stored: replace(stored, f"{Q_PROJ}.weight", lambda weight: weight.to(dtype)))
    name = str(dtype).removeprefix("torch.")
    assert refusal(plain) == f"tensor '{Q_PROJ}.weight' holds {name}, {UNKNOWN_SCALE}"


def test_modelopt_is_refused_by_name(tmp_path: Path) -> None:
    _, plain = checkpoints(CASES["fp8-matrix"], tmp_path)
    (plain / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    message = refusal(plain)
    assert "is quantized by ModelOpt (hf_quant_config.json), which cannot be read" in message
    assert INSTEAD in message


@pytest.mark.parametrize(
    ("name", "part", "new", "why"),
    [
        ("gptq-4-32", "scales", lambda part: part[:1], "has shape [1, 64], but its matrix implies [2, 64]"),
        ("gptq-4-32", "qzeros", lambda part: part[:, :4], "has shape [2, 4], but its matrix implies [2, 8]"),
        ("gptq-4-32", "g_idx", lambda part: part[:8], "has shape [8], but its matrix implies [64]"),
        ("gptq-4-32", "g_idx", lambda part: part + 1, "has groups from 1 to 2, but the matrix has those from 0 to 1"),
        ("gptq-4-32", "g_idx", lambda part: part - 1, "has groups from -1 to 0, but the matrix has those from 0 to 1"),
        ("gptq-4-32", "qweight", lambda part: part.long(), "holds int64, but quantization_config implies int32"),
        ("gptq-4-32", "qweight", lambda part: part[:, :63], "has 63 outputs; the number must be a multiple of 8"),
        ("awq-32", "qzeros", lambda part: part[:1], "has shape [1, 8], but its matrix implies [2, 8]"),
        ("awq-32", "scales", lambda part: part.int(), "holds int32, but quantization_config implies float16"),
        ("fp8-blocks", "weight_scale_inv", lambda part: part[:, :1], "has shape [2, 1], but its matrix implies [2, 3]"),
        (
            "fp8-blocks",
            "weight",
            lambda part: part.float(),
            "holds float32, but quantization_config implies float8_e4m3fn",
        ),
        (
            "int-channel",
            "weight_scale",
            lambda part: part[:3],
            "has shape [3, 1], but its matrix implies [64, 1] or [64]",
        ),
        ("packed-4-32", "weight_packed", lambda part: part[:, :7], "has shape [64, 7], but its matrix implies [64, 8]"),
        ("packed-4-32", "weight_shape", lambda part: part * 0, "is [0, 0], not a valid shape of a matrix"),
        ("packed-4-32-asymmetric", "weight_zero_point", lambda part: part[:7], "has shape [7, 2], but its matrix"),
        ("packed-4-32-act-order", "weight_g_idx", lambda part: part * 2, "has groups from 0 to 2, but the matrix"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    name: str, part: str, new: Callable[[Tensor], Tensor], why: str, tmp_path: Path
) -> None:
    quantized, _ = checkpoints(CASES[name], tmp_path)
    change(quantized, lambda stored: replace(stored, f"{Q_PROJ}.{part}", new))
    assert f"tensor '{Q_PROJ}.{part}' {why}" in refusal(quantized)


def test_a_matrix_of_another_shape_than_the_model_is_named(tmp_path: Path) -> None:
    quantized, _ = checkpoints(awq(32), tmp_path)
    edit(quantized / "config.json", intermediate_size=100)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert refusal(quantized) == f"tensor '{name}' has shape [96, 64], but config.json implies [100, 64]"


def test_a_matrix_of_no_group_is_named(tmp_path: Path) -> None:
    case = packed(4, 32)
    scheme = case.settings["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]}
    quantized, _ = checkpoints(case, tmp_path, config_groups={"group_0": scheme})
    assert (
        "the matrix 'model.layers.0.self_attn.k_proj' is quantized in the checkpoint, but matches no group"
        in refusal(quantized)
    )


GROUP = packed(4, 32).settings["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("case", "settings", "why"),
    [
        (gptq(4, 32), {"group_size": 0}, "group_size 0"),
        (gptq(4, 32), {"group_size": "32"}, "group_size '32'"),
        (gptq(4, 32), {"dynamic": ["-:.*"]}, "dynamic ['-:.*']"),
        (gptq(4, 32), {"dynamic": {"+:.*": 8}}, "+:.* 8"),
        (gptq(4, 32), {"dynamic": {"+:[": {}}}, "the pattern '['"),
        (fp8(None), {"weight_block_size": [128]}, "the block shape [128]"),
        (packed(4, 32), {"config_groups": ["W4A16"]}, "config_groups ['W4A16']"),
        (packed(4, 32), {"config_groups": {"group_0": "W4A16"}}, "group_0 'W4A16'"),
        (packed(4, 32), {"config_groups": {"group_0": {"weights": "int4"}}}, "weights 'int4'"),
        (packed(4, 32), {"config_groups": {"group_0": GROUP | {"targets": "Linear"}}}, "targets 'Linear'"),
        (packed(4, 32), {"ignore": ["re:("]}, "the pattern '('"),
        (packed(4, 32), {"ignore": "lm_head"}, "ignore 'lm_head'"),
        (packed(4, 32), {"ignore": [1]}, "ignore [1]"),
        (packed(4, 32), {"sparsity_config": "dense"}, "sparsity_config 'dense'"),
        (packed(4, 32), {"transform_config": []}, "transform_config []"),
    ],
)
def test_broken_settings_are_named(case: Case, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(case, tmp_path, **settings)
    assert f"config.json has {why} in its quantization_config; it must be" in refusal(quantized)
