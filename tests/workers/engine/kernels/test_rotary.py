"""Head norms, rotation and cache writes in one kernel against the torch layers one after the
other.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from tests.workers.engine.layers.head_norms import KINDS, head_norms
from workers.engine.kernels.rotary import rotate_and_write, write
from workers.engine.layers.base import RotaryHeads
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.rotary import Rotary, prepare

POISON = 12345.0


def places(tokens: int, blocks: int, block_size: int) -> Tensor:
    """Distinct, in no order, none in the null block."""
    return (block_size + torch.randperm((blocks - 1) * block_size)[:tokens]).to(DEVICE)


def expected_cache(k: Tensor, v: Tensor, cache: Tensor, mapping: Tensor) -> Tensor:
    cache, size = cache.clone(), cache.shape[3]
    cache[0, mapping // size, :, mapping % size] = k.to(cache.dtype)
    cache[1, mapping // size, :, mapping % size] = v.to(cache.dtype)
    return cache


def check(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norms: str, block_size: int = 16
) -> None:
    torch.manual_seed(dim)
    blocks = -(-tokens // block_size) + 2
    wide = torch.randn(tokens, heads + 2 * kv_heads + 1, dim, device=DEVICE).to(dtype)
    qkv = wide[:, :-1]  # rows further apart than they are long
    positions = torch.randint(0, 300, (tokens,), device=DEVICE)
    cos, sin = Rotary(RopeConfig(1e4, "default", {}, 300), dim, 300, dtype, DEVICE).cos_sin(positions, positions + 1)
    rotary = RotaryHeads(cos, sin, *head_norms(norms, heads, kv_heads, dim, dtype, DEVICE), norms == "after rotation")
    cache, mapping = (
        torch.full((2, blocks, kv_heads, block_size, dim), POISON, device=DEVICE).to(dtype),
        places(tokens, blocks, block_size),
    )
    q, k, v = qkv.float().split([heads, kv_heads, kv_heads], 1)
    for norm in filter(None, (rotary.query_norm, rotary.key_norm)):
        norm.weight, norm.bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
    wide = replace(rotary, cos=cos.float(), sin=sin.float())
    q, k = prepare(q, rotary.query_norm, wide), prepare(k, rotary.key_norm, wide)
    written = expected_cache(k, v, cache, mapping)
    got = rotate_and_write(qkv, heads, rotary, cache, mapping)
    tolerance = 2e-5 if dtype == torch.float32 else 1 / 64
    torch.testing.assert_close(got.float(), q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.float(), written.float(), rtol=tolerance, atol=tolerance)
    assert got.is_contiguous()


@pytest.mark.parametrize("norms", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (3, 1, 80), (16, 8, 128)])
def test_equals_the_layers(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norms: str) -> None:
    check(5, heads, kv_heads, dim, dtype, norms)


def test_writes_alone() -> None:
    """Queries come back untouched; keys and values from tensors of their own go the same way."""
    qkv = torch.randn(7, 3 + 2 * 3, 24, device=DEVICE)
    cache, mapping = torch.full((2, 4, 3, 4, 24), POISON, device=DEVICE), places(7, 4, 4)
    written = expected_cache(qkv[:, 3:6], qkv[:, 6:], cache, mapping)
    alone = cache.clone()
    assert torch.equal(rotate_and_write(qkv, 3, None, cache, mapping), qkv[:, :3])
    assert torch.equal(cache, written)
    write(qkv[:, 3:6].contiguous(), qkv[:, 6:].transpose(0, 1).contiguous().transpose(0, 1), alone, mapping)
    assert torch.equal(alone, written)


@pytest.mark.gpu
def test_a_cache_of_8_bits_rounds_as_torch_does_and_holds_what_is_too_large() -> None:
    cache = torch.zeros(2, 5, 2, 16, 64, device=DEVICE).to(torch.float8_e4m3fn)
    keys, values = (torch.randn(70, 2, 64, device=DEVICE).bfloat16() * 200 for _ in range(2))
    write(keys, values, cache, torch.arange(70, device=DEVICE))
    for half, tensor in enumerate((keys, values)):
        stored = cache[half].transpose(1, 2).reshape(-1, 2, 64)[:70].float()
        assert torch.equal(stored, tensor.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.gpu
@pytest.mark.parametrize("norms", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(16384, 16, 8, 128), (1024, 32, 8, 128), (256, 14, 2, 64), (1, 32, 32, 80), (333, 9, 3, 256)],
)
def test_real_shapes(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norms: str) -> None:
    check(tokens, heads, kv_heads, dim, dtype, norms)
