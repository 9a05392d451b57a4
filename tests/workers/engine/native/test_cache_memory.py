"""Memory for blocks of the cache before they are used: as many as were used; content is kept."""

import ctypes
import logging
import mmap

import numpy as np
import pytest
import torch

from workers.engine.messages.step import NewBlocks, StepPlan
from workers.engine.native import cache_memory
from workers.engine.native.cache_memory import CacheMemory
from workers.engine.native.memory import huge_zeros, populate

# As the kernel of an image for other processors, or a sandbox, may not be able to
pytestmark = pytest.mark.skipif(not populate(huge_zeros((1, 1), torch.float32)), reason="the system cannot populate")
NO_LONGER = "the KV cache is no longer populated while the engine is idle; bursts may take longer"
LAYERS, BLOCKS, BLOCK_NUMBERS = 3, 400, 1 << 17  # a block of a layer has 512 KiB, four are a piece


def caches() -> list[torch.Tensor]:
    return [huge_zeros((BLOCKS, 1, BLOCK_NUMBERS), torch.float32) for _ in range(LAYERS)]


def plan(*blocks: list[int]) -> StepPlan:
    nothing = np.zeros(0, np.int32)
    return StepPlan(0, [], [NewBlocks(0, 0, ids) for ids in blocks], nothing, nothing, nothing, nothing)


def populated(cache: torch.Tensor) -> list[int]:
    """The blocks that have memory."""
    there = np.zeros(cache.nbytes // mmap.PAGESIZE, np.uint8)
    to = there.ctypes.data_as(ctypes.c_void_p)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.nbytes), to) == 0
    blocks = there.reshape(BLOCKS, -1)
    assert (blocks.any(1) == blocks.all(1)).all()
    return np.flatnonzero(blocks.all(1)).tolist()


def run(memory: CacheMemory) -> int:
    """Populate all that there is to populate; return the number of pieces."""
    pieces = 0
    while memory.is_behind:
        memory.populate()
        pieces += 1
        assert pieces < 1000
    return pieces


def test_nothing_is_populated_before_the_first_step() -> None:
    assert run(CacheMemory(caches(), lambda: None)) == 0


def test_as_many_blocks_as_were_used_get_memory_and_keep_what_they_hold() -> None:
    layers = caches()
    memory = CacheMemory(layers, lambda: None)
    for layer in layers:
        layer[:20] = 1.5
    memory.use(plan([3, 7], [19, 4]))
    assert run(memory) == LAYERS * 5
    assert [populated(layer) for layer in layers] == [list(range(40))] * LAYERS
    assert all((layer[:20] == 1.5).all() and not layer[20:40].any() for layer in layers)
    memory.use(plan([5]))
    assert run(memory) == 0
    memory.use(plan([29]))
    assert run(memory) == LAYERS * 5
    assert [populated(layer) for layer in layers] == [list(range(60))] * LAYERS


def test_blocks_that_come_into_use_meanwhile_are_left_out() -> None:
    layers = caches()
    memory = CacheMemory(layers, lambda: None)
    memory.use(plan([19]))
    memory.populate()
    memory.use(plan([99]))
    assert run(memory) == LAYERS - 1 + LAYERS * 25
    assert [populated(layer) for layer in layers] == [[*range(20, 24), *range(100, 200)]] * LAYERS


@pytest.mark.parametrize("used", [BLOCKS - 1, BLOCKS - 5])
def test_it_ends_with_the_cache(used: int) -> None:
    layers = caches()
    memory = CacheMemory(layers, lambda: None)
    memory.use(plan([used]))
    run(memory)
    assert [populated(layer) for layer in layers] == [list(range(used + 1, BLOCKS))] * LAYERS


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "_MOST_BYTES", 24 << 20)
    layers = caches()
    memory = CacheMemory(layers, lambda: None)
    memory.use(plan([99]))
    assert run(memory) == LAYERS * 4
    assert [populated(layer) for layer in layers] == [list(range(100, 116))] * LAYERS


def test_it_ends_where_memory_is_scarce(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layers, left = caches(), iter([4 << 30, 1 << 30, 4 << 30])
    memory = CacheMemory(layers, lambda: next(left))
    memory.use(plan([99]))
    assert run(memory) == 2
    memory.use(plan([199]))
    assert not memory.is_behind
    assert [len(populated(layer)) for layer in layers] == [4, 0, 0]
    assert caplog.messages == [f"{NO_LONGER}: less than 2 GiB are left"]


def test_it_ends_where_the_system_cannot_populate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("workers.engine.native.memory._MADV_POPULATE_WRITE", 9999)
    memory = CacheMemory(caches(), lambda: None)
    memory.use(plan([99]))
    assert run(memory) == 1
    assert not memory.is_behind
    assert caplog.messages == [f"{NO_LONGER}: the system does not populate memory"]
