"""Paged attention against the plain formula, over random mixes of prefill and decode rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.attention import reference as torch_backend
from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.backends.registry import find_backend
from workers.engine.layers.base import AttentionPattern, AttentionShape
from workers.engine.messages.cache_groups import CacheRule

BLOCK = 4
NUM_BLOCKS = 200
DIM = 8
SCALE = 0.3


class Contexts:
    """Rows with random keys and values, some of them already in the cache, in blocks handed out in
    random order.
    """

    def __init__(self, contexts: list[int], kv_heads: int, dtype: torch.dtype, generator: np.random.Generator) -> None:
        self.contexts, self.kv_heads = contexts, kv_heads
        torch.manual_seed(int(generator.integers(2**31)))
        self.keys = [torch.randn(length, kv_heads, DIM).to(dtype) for length in contexts]
        self.values = [torch.randn(length, kv_heads, DIM).to(dtype) for length in contexts]
        free = iter(generator.permutation(np.arange(1, NUM_BLOCKS)))
        self.tables = np.zeros((len(contexts), 30), np.int32)
        for row, length in enumerate(contexts):
            for column in range(-(-length // BLOCK)):
                self.tables[row, column] = next(free)

    def slots(self, row: int, first: int, last: int) -> list[int]:
        return [int(self.tables[row, position // BLOCK]) * BLOCK + position % BLOCK for position in range(first, last)]

    def left(self, row: int, start: int, pattern: AttentionPattern) -> list[int]:
        """Return the null block, and those before all that the token at `start` reads."""
        number = CacheRule(pattern.window, pattern.chunk).first_read(start) // BLOCK
        return [0, *map(int, self.tables[row, :number])]

    def metadata(self, spans: list[tuple[int, int, int]]) -> AttentionMetadata:
        """For spans (row, first, last) of tokens computed together."""
        slots = [slot for span in spans for slot in self.slots(*span)]
        starts = np.cumsum([0] + [last - first for _, first, last in spans]).astype(np.int32)
        rows = [row for row, _, _ in spans]
        ends = np.array([last for _, _, last in spans], np.int32)
        return AttentionMetadata(torch.tensor(slots), starts, ends, self.tables[rows])


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    shape: AttentionShape,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """One query [heads, d] over everything that it sees."""
    pattern = shape.pattern
    first, last = 0, position + 1 if pattern.causal else len(keys)
    if pattern.chunk is not None:
        first = position - position % pattern.chunk
    if pattern.window is not None:
        first = max(0, position + pattern.causal - pattern.window)
        last = min(last, position + 1 + pattern.window)
    per_kv = q.shape[0] // keys.shape[1]
    seen = keys[first:last].float().repeat_interleave(per_kv, 1)
    scores = torch.einsum("hd,lhd->hl", q.float(), seen) * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    if bias is not None:
        reach = bias.shape[1] // 2
        scores += bias[:, (torch.arange(first, last) - position).clamp(-reach, reach) + reach]
    if sinks is not None:
        scores = torch.cat((sinks[:, None], scores), -1)
    weights = scores.softmax(-1)[:, -(last - first) :]
    return torch.einsum("hl,lhd->hd", weights, values[first:last].float().repeat_interleave(per_kv, 1))


backends = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_native)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "pattern",
    [AttentionPattern(), *(AttentionPattern(window=window) for window in (1, 3, 9)), AttentionPattern(chunk=7)],
    ids=["all", "window-1", "window-3", "window-9", "chunk-7"],
)
@pytest.mark.parametrize("per_kv", [1, 3])
@backends
def test_mixed_rows(
    pattern: AttentionPattern, per_kv: int, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several groups of decode rows, and several parts of a prompt
    monkeypatch.setitem(torch_backend._GROUP_BYTES, "cpu", 2048)
    generator = np.random.default_rng(7)
    for soft_cap, with_sinks in [*[(None, False)] * 3, (1.5, False), (None, True), (1.5, True)]:
        shape = AttentionShape(2 * per_kv, 2, DIM, SCALE, pattern, soft_cap=soft_cap)
        sinks = torch.linspace(-2, 3, 2 * per_kv) if with_sinks else None
        contexts = generator.integers(1, 60, 9).tolist()
        rows = Contexts(contexts, 2, dtype, generator)
        attention = find_backend(backend).attention(
            CacheShape(NUM_BLOCKS, BLOCK, 2, DIM), 2 * per_kv, dtype, torch.device("cpu")
        )
        cache = attention.new_cache(1)[0]
        computed = [int(generator.integers(0, length)) if i % 3 else length - 1 for i, length in enumerate(contexts)]
        # What is computed already, written by steps of their own; then the rest of every row in one
        # call.
        for spans in (
            [(i, 0, n) for i, n in enumerate(computed) if n],
            [(i, n, contexts[i]) for i, n in enumerate(computed)],
        ):
            q = torch.randn(sum(last - first for _, first, last in spans), 2 * per_kv, DIM).to(dtype)
            k = torch.cat([rows.keys[i][first:last] for i, first, last in spans])
            v = torch.cat([rows.values[i][first:last] for i, first, last in spans])
            by_block = cache if backend == "cpu" else cache.transpose(0, 1)
            by_block[[block for i, first, _ in spans for block in rows.left(i, first, pattern)]] = torch.nan
            out = attention.forward(q, k, v, cache, rows.metadata(spans), shape, sinks)
        places = [(i, position) for i, first, last in spans for position in range(first, last)]
        expected = torch.stack(
            [plain(q[t], rows.keys[i], rows.values[i], p, shape, sinks) for t, (i, p) in enumerate(places)]
        )
        assert (out.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("per_kv", [1, 3])
@pytest.mark.parametrize("reach", [None, 5, 80])  # of a bias
@backends
def test_whole_texts_seen_to_both_sides(
    reach: int | None, window: int | None, per_kv: int, dtype: torch.dtype, backend: str
) -> None:
    generator, limited = np.random.default_rng(3), reach == 5
    shape = AttentionShape(
        2 * per_kv, 2, DIM, SCALE, AttentionPattern(False, window), soft_cap=1.5 if limited else None
    )
    sinks = torch.linspace(-2, 3, 2 * per_kv) if limited else None
    contexts = [1, *generator.integers(1, 60, 9).tolist()]
    rows = Contexts(contexts, 2, dtype, generator)
    attention = find_backend(backend).attention(
        CacheShape(NUM_BLOCKS, BLOCK, 2, DIM), 2 * per_kv, dtype, torch.device("cpu")
    )
    cache = attention.new_cache(1)[0].fill_(float("nan"))
    q = torch.randn(sum(contexts), 2 * per_kv, DIM).to(dtype)
    bias = None if reach is None else torch.randn(2 * per_kv, 2 * reach + 1).to(dtype).float()
    metadata = rows.metadata([(i, 0, length) for i, length in enumerate(contexts)])
    out = attention.forward(q, torch.cat(rows.keys), torch.cat(rows.values), cache, metadata, shape, sinks, bias)
    places = [(i, position) for i, length in enumerate(contexts) for position in range(length)]
    expected = torch.stack(
        [plain(q[t], rows.keys[i], rows.values[i], p, shape, sinks, bias) for t, (i, p) in enumerate(places)]
    )
    assert (out.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dirt", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "pattern",
    [AttentionPattern(), AttentionPattern(window=6), AttentionPattern(chunk=6)],
    ids=["all", "window", "chunk"],
)
@backends
def test_what_an_earlier_request_left_does_no_harm(dirt: float, pattern: AttentionPattern, backend: str) -> None:
    """In a block past a row's end, or in a free one: wrong numbers of one request must not
    reach others.
    """
    generator = np.random.default_rng(1)
    rows = Contexts([10, 29, 16], 1, torch.float32, generator)
    attention = find_backend(backend).attention(
        CacheShape(NUM_BLOCKS, BLOCK, 1, DIM), 1, torch.float32, torch.device("cpu")
    )
    outs, shape = [], AttentionShape(1, 1, DIM, SCALE, pattern)
    for content in (0.0, dirt):
        cache = attention.new_cache(1)[0]
        cache.fill_(content)
        torch.manual_seed(0)
        step = [(0, 0, 5), (1, 0, 22), (2, 0, 12)]
        while step:
            q = torch.randn(sum(b - a for _, a, b in step), 1, DIM)
            k = torch.cat([rows.keys[i][a:b] for i, a, b in step])
            v = torch.cat([rows.values[i][a:b] for i, a, b in step])
            outs.append(attention.forward(q, k, v, cache, rows.metadata(step), shape))
            step = [(i, b, b + 1) for i, _, b in step if b < rows.contexts[i]]
    half = len(outs) // 2
    for clean, dirty in zip(outs[:half], outs[half:], strict=True):
        assert torch.equal(clean, dirty)
