"""The ranks of a tensor-parallel replica: who holds which part of a layer, and what they say to
each other while a step runs.

The split is Megatron-LM's (Shoeybi et al., 2019): attention heads and the MLP's width are cut so
that each pair of projections needs one sum over the ranks; the output projection is cut by
vocabulary, and its logits are gathered so that every rank samples the same tokens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from workers.engine.messages.errors import ModelLoadError

_LOOPBACK = "127.0.0.1"
_GRAIN = 16
# A rank that has died is noticed by its process' end, and a hung one by the worker process'
# watchdog, both long before this.
_TIMEOUT = timedelta(hours=1)
# torch 2.13 gave the one a new name and warns at the old one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The part `start` to `start + length` of `total` rows or columns in the checkpoint."""

    start: int
    length: int
    total: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.length)

    def within(self, part: int, parts: int) -> Shard:
        """Return this shard of part `part` of a tensor with `parts` such totals side by side."""
        return Shard(part * self.total + self.start, self.length, parts * self.total)


class Parallel:
    """Rank `rank` of `size`. Alone, which is the default, it holds everything and says nothing."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, store: Store) -> Parallel:
        """Meet the other ranks in `store`: NCCL on GPUs, gloo on CPUs.

        Returns when all are there. For one group in a process, whose end ends it: NCCL may wait for
        ranks that have ended when a group is destroyed.

        Raises ModelLoadError where torch has no such backend.
        """
        cuda = device.type == "cuda"
        if cuda and not dist.is_nccl_available():
            raise ModelLoadError(
                f"torch {torch.__version__} has no NCCL, which a tensor parallel size of {size} needs on GPUs"
            )
        # All ranks are on this host.
        os.environ.setdefault("NCCL_SOCKET_IFNAME" if cuda else "GLOO_SOCKET_IFNAME", _loopback_interface())
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if cuda else None,
        )
        return cls(rank, size, device)

    def shard(self, length: int, copies: int = 1) -> Shard:
        """This rank's `length` of what all ranks hold, where `copies` ranks hold the same."""
        return Shard(self.rank // copies * length, length, length * self.size // copies)

    def part(self, total: int) -> Shard:
        """This rank's part of `total` rows that can be cut anywhere: `part_size` of them, on the
        last ranks fewer.
        """
        size = self.part_size(total)
        start = min(self.rank * size, total)
        return Shard(start, min(size, total - start), total)

    def part_size(self, total: int) -> int:
        """Return the longest part: equal ones where that comes out even, else a multiple of what
        matrix units work on.
        """
        equal = -(-total // self.size)
        rounded = -(-equal // _GRAIN) * _GRAIN
        return equal if total % self.size == 0 or rounded * (self.size - 1) >= total else rounded

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of contiguous `x`, in its place; the same bits on each."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Gather each rank's part [R, length] of the vocabulary -> contiguous float32 [R,
        vocab_size] on all of them.
        """
        if self.size == 1:
            return logits.float()
        rows, length = logits.shape
        gathered = torch.empty((self.size * rows, length), dtype=logits.dtype, device=logits.device)
        _all_gather(gathered, logits)
        by_row = gathered.view(self.size, rows, length).transpose(0, 1)
        together = by_row.to(torch.float32, memory_format=torch.contiguous_format).contiguous().view(rows, -1)
        return together[:, :vocab_size].contiguous()

    def least(self, value: int) -> int:
        """Return the least of what the ranks say. Waits until all have spoken."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return int(said.item())


def listening_store(size: int) -> tuple[Store, int]:
    """Return a place where `size` ranks meet, on a free port of the loopback interface alone, and
    that port. It lasts as long as the store.
    """
    # torch's own server would listen on every interface.
    listener = socket.create_server((_LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        size,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connected_store(size: int, port: int) -> Store:
    """Return the other ranks' way to `listening_store`."""
    return TCPStore(_LOOPBACK, port, size, is_master=False, timeout=_TIMEOUT)


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
