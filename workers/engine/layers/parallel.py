"""Define the ranks of a tensor-parallel replica: their parts of each layer, and their communication
during a step.

The sharding is Megatron-LM's (Shoeybi et al., 2019): attention heads and the MLP's width are split
so that each pair of projections needs one sum over the ranks. The output projection is split by
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
# A dead rank is detected by the exit of its process, and a hung one by the worker process's
# watchdog, both long before this.
_TIMEOUT = timedelta(hours=1)
# torch 2.13 renamed this function and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows or columns `start` to `start + length` of `total` in the checkpoint."""

    start: int
    length: int
    total: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.length)

    def select(self, where: slice) -> slice:
        """Return some of these rows as rows of the checkpoint."""
        return slice(self.start + where.start, self.start + where.stop)

    def within(self, part: int, parts: int) -> Shard:
        """Return this shard within part `part` of a tensor that concatenates `parts` such
        totals.
        """
        return Shard(part * self.total + self.start, self.length, parts * self.total)


class Parallel:
    """Rank `rank` of `size`. The default is a single rank, which has everything and never
    communicates.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, store: Store) -> Parallel:
        """Join the other ranks through `store`: NCCL on GPUs, gloo on CPUs.

        Returns once all have joined. Join once per process; the group ends with the process, since
        NCCL may wait for ended ranks when a group is destroyed.

        Raises ModelLoadError if torch lacks the backend.
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
        """Return this rank's shard of `length`, if `copies` ranks have the same shard."""
        return Shard(self.rank // copies * length, length, length * self.size // copies)

    def part(self, total: int) -> Shard:
        """Return this rank's part of `total` rows that can be split anywhere: `part_size` rows, on
        the last ranks fewer.
        """
        size = self.part_size(total)
        start = min(self.rank * size, total)
        return Shard(start, min(size, total - start), total)

    def part_size(self, total: int) -> int:
        """Return the longest part: an equal share if it divides evenly, else a multiple of the
        granularity of matrix units.
        """
        equal = -(-total // self.size)
        rounded = -(-equal // _GRAIN) * _GRAIN
        return equal if total % self.size == 0 or rounded * (self.size - 1) >= total else rounded

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of contiguous `x`, in place; the same bits on each."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Gather each rank's part [R, length] of the vocabulary into contiguous float32 [R,
        vocab_size] on all ranks.
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
        """Return the minimum of `value` over all ranks. Waits for all ranks."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return int(said.item())


def listening_store(size: int) -> tuple[Store, int]:
    """Return a store where `size` ranks join, and its port: a free one of the loopback interface
    only. The port is open as long as the store exists.
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
    """Return the connection of another rank to `listening_store`."""
    return TCPStore(_LOOPBACK, port, size, is_master=False, timeout=_TIMEOUT)


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
