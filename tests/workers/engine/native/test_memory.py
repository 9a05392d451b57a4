"""Memory that is given as it is touched, in huge pages where the system has them."""

import os
import re
from pathlib import Path

import pytest
import torch

from workers.engine.native.memory import huge_zeros

MIB = 1 << 20


def field(name: str) -> int:
    """Bytes of this process's memory, as the kernel counts them."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_ones_are_zeros_aligned_and_given_lazily() -> None:
    before = resident()
    tensor = huge_zeros((4, 1 << 30), torch.bfloat16)
    assert tensor.shape == (4, 1 << 30)
    assert tensor.data_ptr() % (2 * MIB) == 0
    assert resident() - before < 64 * MIB
    assert not tensor[2, :1000].any()
    tensor[3, -1] = 5
    assert tensor[3, -1] == 5


def test_small_ones_are_apart_and_aligned() -> None:
    tensors = [huge_zeros((n, 3), torch.float32) for n in (0, 1, 1000, 5)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
        assert not tensor.any()
        tensor.fill_(number)
    assert [tensor.shape for tensor in tensors] == [(0, 3), (1, 3), (1000, 3), (5, 3)]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_pages_are_huge() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("the system gives no huge pages")
    before = field("AnonHugePages")
    tensor = huge_zeros((64 * MIB,), torch.uint8)
    tensor.fill_(1)
    if field("AnonHugePages") == before:
        pytest.skip("the system has no huge pages left")
    assert field("AnonHugePages") - before > 32 * MIB


def test_what_no_address_space_holds_is_a_want_of_memory() -> None:
    with pytest.raises(MemoryError):
        huge_zeros((1 << 50,), torch.float32)
