"""Head norms, rotation and the write to the paged cache, in one pass over a step's queries, keys
and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.layers.base import HeadNorm, RotaryHeads

_HEADS = 8  # heads of one program
_LARGEST_FP8 = tl.constexpr(448.0)


def rotate_and_write(
    qkv: Tensor, heads: int, rotary: RotaryHeads | None, layer_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Write the keys and values of qkv [T, heads + 2 * kv_heads, d] to layer_cache [2, blocks,
    kv_heads, block_size, d] and return the queries [T, heads, d].

    Queries and keys are first normed, if there are norms, and rotated, all in float32 and rounded
    once. Without `rotary` the queries are returned unchanged, as a view. Of qkv [T, heads, d]
    nothing is written.
    """
    if rotary is None:
        kv_heads = layer_cache.shape[2]
        write(qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :], layer_cache, slot_mapping)
        return qkv[:, :heads]
    tokens, total, head_dim = qkv.shape
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    query_norm, key_norm = rotary.query_norm, rotary.key_norm or rotary.query_norm
    _rotate_and_write[(tokens, triton.cdiv(total, _HEADS))](
        qkv,
        rotary.cos,
        rotary.sin,
        *_weights(query_norm),
        *_weights(key_norm),
        q,
        layer_cache,
        slot_mapping,
        qkv.stride(0),
        qkv.stride(1),
        rotary.cos.stride(0),
        *layer_cache.stride()[:3],
        0.0 if query_norm is None else query_norm.eps,
        heads,
        (total - heads) // 2,
        layer_cache.shape[3],
        head_dim,
        triton.next_power_of_2(head_dim // 2),
        _HEADS,
        query_norm is not None and query_norm.weight.dim() > 1,
        rotary.norm_after_rotation,
        num_warps=4 if head_dim > 64 else 2,
    )
    return q


def _weights(norm: HeadNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def write(k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, kv_heads, d] of any strides to layer_cache [2, blocks, kv_heads,
    block_size, d], at the slots in slot_mapping int64 [T].
    """
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    _write[(tokens,)](
        k,
        v,
        layer_cache,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *layer_cache.stride()[:3],
        kv_heads,
        layer_cache.shape[3],
        head_dim,
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_write(
    qkv,
    cos,
    sin,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    q,
    cache,
    slot_mapping,
    token_stride,
    head_stride,
    angle_stride,
    values_stride,
    block_stride,
    cache_head_stride,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BY_HEAD: tl.constexpr = False,
    NORM_LAST: tl.constexpr = False,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = column < HEAD_DIM // 2
    mask = (head < heads + 2 * kv_heads) & inside
    source = qkv + token * token_stride + head * head_stride + column
    low = tl.load(source, mask, 0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask, 0.0).to(tl.float32)
    is_query, is_value = head < heads, head >= heads + kv_heads
    turned_low, turned_high = low, high
    if query_weight is not None and not NORM_LAST:
        turned_low, turned_high = _normed_heads(
            low,
            high,
            query_weight,
            query_bias,
            key_weight,
            key_bias,
            head,
            column,
            eps,
            heads,
            kv_heads,
            HEAD_DIM,
            BY_HEAD,
        )
    # Both halves rotate by the same angles; the sine's first half is the negative of its second.
    angle = token * angle_stride + HEAD_DIM // 2 + column
    cosine = tl.load(cos + angle, inside, 0.0).to(tl.float32)
    sine = tl.load(sin + angle, inside, 0.0).to(tl.float32)
    turned_low, turned_high = turned_low * cosine - turned_high * sine, turned_high * cosine + turned_low * sine
    if query_weight is not None and NORM_LAST:
        turned_low, turned_high = _normed_heads(
            turned_low,
            turned_high,
            query_weight,
            query_bias,
            key_weight,
            key_bias,
            head,
            column,
            eps,
            heads,
            kv_heads,
            HEAD_DIM,
            BY_HEAD,
        )
    low = tl.where(is_value, low, turned_low)
    high = tl.where(is_value, high, turned_high)
    target = q + (token * heads + head) * HEAD_DIM + column
    tl.store(target, low.to(q.dtype.element_ty), mask & is_query)
    tl.store(target + HEAD_DIM // 2, high.to(q.dtype.element_ty), mask & is_query)
    place = tl.load(slot_mapping + token)
    cache += (place // BLOCK_SIZE) * block_stride + (place % BLOCK_SIZE) * HEAD_DIM
    kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
    target = cache + tl.where(is_value, values_stride, 0).to(tl.int64) + kv_head * cache_head_stride + column
    tl.store(target, _stored(low, cache), mask & (head >= heads))
    tl.store(target + HEAD_DIM // 2, _stored(high, cache), mask & (head >= heads))


@triton.jit
def _stored(numbers, cache):
    """Convert numbers to the cache's type; fp8 has no infinity, so larger numbers are clamped."""
    if cache.dtype.element_ty == tl.float8e4nv:
        numbers = tl.clamp(numbers.to(tl.float32), -_LARGEST_FP8, _LARGEST_FP8)
    return numbers.to(cache.dtype.element_ty)


@triton.jit
def _normed_heads(
    low,
    high,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    head,
    column,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """Norm both halves of query and key heads; value heads become undefined."""
    is_query, queries, keys, at = head < heads, column < HEAD_DIM // 2, column < HEAD_DIM // 2, column
    if query_bias is not None:
        mean = (tl.sum(low, 1) + tl.sum(high, 1))[:, None] / HEAD_DIM
        low, high = tl.where(queries, low - mean, 0.0), tl.where(queries, high - mean, 0.0)
    if BY_HEAD:
        queries, keys = queries & is_query, keys & ~is_query & (head < heads + kv_heads)
        at = tl.where(is_query, head, head - heads) * HEAD_DIM + column
    scale = 1.0 / tl.sqrt_rn((tl.sum(low * low, 1) + tl.sum(high * high, 1))[:, None] / HEAD_DIM + eps)
    low *= scale * _of_heads(query_weight, key_weight, at, is_query, queries, keys)
    high *= scale * _of_heads(query_weight, key_weight, at + HEAD_DIM // 2, is_query, queries, keys)
    if query_bias is not None:
        low += _of_heads(query_bias, key_bias, at, is_query, queries, keys)
        high += _of_heads(query_bias, key_bias, at + HEAD_DIM // 2, is_query, queries, keys)
    return low, high


@triton.jit
def _of_heads(query_numbers, key_numbers, at, is_query, queries, keys):
    query = tl.load(query_numbers + at, queries, 0.0).to(tl.float32)
    key = tl.load(key_numbers + at, keys, 0.0).to(tl.float32)
    return tl.where(is_query, query, key)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write(
    k,
    v,
    cache,
    slot_mapping,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    values_stride,
    block_stride,
    cache_head_stride,
    kv_heads: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < kv_heads) & (column < HEAD_DIM)
    key = tl.load(k + token * key_stride + head * key_head_stride + column, mask)
    value = tl.load(v + token * value_stride + head * value_head_stride + column, mask)
    place = tl.load(slot_mapping + token)
    cache += (place // BLOCK_SIZE) * block_stride + (place % BLOCK_SIZE) * HEAD_DIM
    target = cache + head * cache_head_stride + column
    tl.store(target, _stored(key, cache), mask)
    tl.store(target + values_stride, _stored(value, cache), mask)
