"""Memory that is given as it is touched, in huge pages where the system has them."""

import os
import re
from pathlib import Path

import pytest
import torch

from workers.engine.native.memory import huge_zeros, zeros_together

MIB = 1 << 20


def mapping_of(tensor: torch.Tensor) -> tuple[str, list[str]]:
    """Return how the memory of a tensor is shared ("rw-p" if it is not), and the flags that
    the kernel keeps for it.
    """
    mode, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line):
            mode, inside = found[3], int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return mode, line.split()[1:]
    raise AssertionError("the tensor is in no mapping")


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


def test_what_is_made_together_goes_back_together() -> None:
    tensors = zeros_together((1, 32 * MIB, 0, 1000), torch.bfloat16)
    assert [len(tensor) for tensor in tensors] == [1, 32 * MIB, 0, 1000]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(
        bool((end == number).all()) for number, tensor in enumerate(tensors) for end in (tensor[:9], tensor[-9:])
    )
    before = resident()
    del tensor, tensors
    assert before - resident() > 48 * MIB


def test_pages_are_huge() -> None:
    """As far as the system has any left: they are asked for, and the memory is private, for what is
    shared gets none.
    """
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file():
        pytest.skip("the system has no huge pages")
    mode, flags = mapping_of(huge_zeros((64 * MIB,), torch.uint8))
    assert mode == "rw-p"
    assert "hg" in flags


def test_what_no_address_space_holds_is_a_want_of_memory() -> None:
    with pytest.raises(MemoryError):
        huge_zeros((1 << 50,), torch.float32)
