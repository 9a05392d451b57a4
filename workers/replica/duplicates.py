"""Duplicates: requests of one batch that must get the same answer. One of them, the original, runs;
its copies wait and get its answer.

A copy is held under a lease of its own, as any request, and has no slot in the engine. Where the
original ends without an answer, the first copy becomes the original. Where it failed, all copies
run: most often each fails in the same way, and one after the other would take many times as long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs.protocol.requests import Claim, Finished, RequestKey
from workers.replica.due_tokens import AnyInFlight
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.prepared import Prepare, Prepared
from workers.replica.tracing import RequestTraces

MAX_KEPT_BYTES = 1 << 24
"""Memory that finished answers take at most, for copies that are claimed later."""

MAX_COPIES = 128
"""Copies that wait for originals that run; more of the same run beside them. They hold up no other
work, and their answers add no more than so many to the results in Redis.
"""

_BYTES_OF_OBJECTS = 10  # that a byte of JSON becomes, about
_BYTES_OF_TOKEN = 200  # the same of a token, shown or not
_MOST_SUSPECTS = 4096  # beyond which all are forgotten

Digest = tuple[str, bytes]
"""Of a batch the id, and of its request what `digest_of` returns."""


def prepare_once(
    prepare: Prepare,
    known: Callable[[Digest], Prepared | None],
    traces: RequestTraces | None,
    claims: Sequence[Claim],
) -> tuple[list[Prepared], list[Finished]]:
    """Prepare requests, of those that get the same answer only one, and say which these are; return
    them in the order of the claims.

    `known` as `Duplicates.prepared`. The first one, prepared, says whether the answer is certain;
    where it is not, and where the first one cannot run, each is prepared.
    """
    digests = {claim.key: (claim.key.batch, digest) for claim in claims if (digest := digest_of(claim))}
    alike = {digest: item for digest in set(digests.values()) if (item := known(digest)) is not None}
    firsts = {digest: key for key, digest in reversed(digests.items()) if digest not in alike}

    def prepare_some(some: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
        prepared, errors = prepare(some) if some else ([], [])
        for item in prepared:
            digest = digests.get(item.claim.key)
            if digest is not None and (isinstance(item, PreparedPooling) or item.call.is_deterministic):
                item.digest = digest[1]
                alike[digest] = item
        return prepared, errors

    own = {claim.key for claim in claims if claim.key not in digests} | set(firsts.values())
    prepared, errors = prepare_some([claim for claim in claims if claim.key in own])
    others = [claim for claim in claims if claim.key not in own]
    copies = [dataclasses.replace(alike[d], claim=claim) for claim in others if (d := digests[claim.key]) in alike]
    if traces is not None:
        traces.copied(copies)
    copied = {item.claim.key for item in copies}
    more, more_errors = prepare_some([claim for claim in others if claim.key not in copied])
    turns = {claim.key: turn for turn, claim in enumerate(claims)}
    everything = sorted([*prepared, *copies, *more], key=lambda item: turns[item.claim.key])
    return everything, [*errors, *more_errors]


def digest_of(claim: Claim) -> bytes:
    """Return what requests of a batch have in common that may get the same answer: their endpoint
    and their body, byte for byte.

    It is empty for a live call, and for a request that may have crashed an engine core.
    """
    if claim.live or claim.engine_crashes:
        return b""
    return hashlib.sha256(b"%b %b" % (claim.request.endpoint.encode(), claim.request.body)).digest()


class Copy(NamedTuple):
    """A request that waits for an answer, and when it was claimed, on the monotonic clock."""

    claim: Claim
    arrived: float


class _KeptAnswer(NamedTuple):
    """A request that has ended, for copies that are claimed later, and how it was prepared."""

    answer: AnyInFlight
    prepared: Prepared
    size: int  # bytes, about


@dataclass(slots=True)
class _CopyGroup:
    """The original of some requests, how each of them is to run, and its copies."""

    original: RequestKey | None  # None: it has ended
    prepared: Prepared
    answer: AnyInFlight | None = None
    failed: bool = False  # whether the original ended with an error
    copies: dict[RequestKey, Copy] = field(default_factory=dict)


class Duplicates:
    """The originals and copies of one engine core. Used from the event loop only."""

    def __init__(
        self,
        repeat: Callable[[AnyInFlight, Copy], None],
        start: Callable[[Prepared], None],
        suspects: set[Digest] | None = None,
    ) -> None:
        """`repeat` gives a copy the answer of a request that has ended, `start` runs one.

        `suspects`: what ran when earlier cores of this worker crashed, and was not answered since.
        """
        self._repeat = repeat
        self._start = start
        self._suspects: set[Digest] = set() if suspects is None else suspects
        self._groups: dict[Digest, _CopyGroup] = {}
        self._items: dict[RequestKey, Prepared] = {}  # requests in flight that have a digest
        self._waiting = 0  # copies
        self._kept: OrderedDict[Digest, _KeptAnswer] = OrderedDict()
        self._kept_bytes = 0

    def prepared(self, digest: Digest) -> Prepared | None:
        """Return how a request was prepared that has or gets the answer of this digest, if there is
        one. It only reads: the thread that prepares may call it.
        """
        known = self._groups.get(digest) or self._kept.get(digest)
        return None if known is None else known.prepared

    def take(self, item: Prepared, now: float) -> bool:
        """Have a request wait for an answer and return True; else it is to run.

        One of which something was published runs: its readers have seen the beginning. So do all
        suspects, as long as none is answered: one after the other would crash as many cores.
        """
        if not item.digest:
            return False
        key = item.claim.key
        self._items[key] = item
        digest = _digest_in_batch(item)
        if item.claim.checkpoint is not None or digest in self._suspects:
            self._groups.setdefault(digest, _CopyGroup(key, item))
            return False
        group = self._groups.get(digest)
        if group is None and digest not in self._kept:
            self._groups[digest] = _CopyGroup(key, item)
            return False
        if group is None:
            self._kept.move_to_end(digest)
            group = self._groups[digest] = _CopyGroup(None, item, self._kept[digest].answer)
            self._go_on_soon(digest)
        if group.answer is None and self._waiting >= MAX_COPIES:
            return False
        group.copies[key] = Copy(item.claim, now)
        self._waiting += 1
        return True

    def waiting(self) -> list[RequestKey]:
        """Return the copies that wait."""
        return [key for group in self._groups.values() for key in group.copies]

    def claim(self, key: RequestKey) -> Claim | None:
        """Return the claim of a copy that waits."""
        group = self._group_of(key)
        copy = None if group is None else group.copies.get(key)
        return None if copy is None else copy.claim

    def answered(self, request: AnyInFlight, finished: Finished) -> None:
        """Note the answer of a request that ran."""
        item = self._items.get(request.claim.key)
        if item is None:
            return
        digest = _digest_in_batch(item)
        self._suspects.discard(digest)
        if (group := self._groups.get(digest)) is not None:
            group.answer = request
        tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
        shown = len(request.claim.request.body) + len(finished.result.body)
        self._keep(digest, _KeptAnswer(request, item, _BYTES_OF_OBJECTS * shown + _BYTES_OF_TOKEN * tokens))
        self.leave(request.claim.key)

    def leave(self, key: RequestKey, failed: bool = False) -> None:
        """Forget a request that has ended in some way; copies that waited for it go on."""
        group, item = self._group_of(key), self._items.pop(key, None)
        if group is None or item is None:
            return
        if group.copies.pop(key, None) is not None:
            self._waiting -= 1
        if group.original == key:
            group.original, group.failed = None, failed
            self._go_on_soon(_digest_in_batch(item))

    def suspect(self, keys: Iterable[RequestKey]) -> None:
        """Note requests that ran when the core crashed."""
        if len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.clear()
        self._suspects.update(_digest_in_batch(self._items[key]) for key in keys if key in self._items)

    def forget_batch(self, batch: str) -> None:
        """Drop what is kept of a batch."""
        for digest in [digest for digest in self._kept if digest[0] == batch]:
            self._drop(digest)

    def _group_of(self, key: RequestKey) -> _CopyGroup | None:
        """Return the group of a request; it lasts as long as its original and its copies."""
        item = self._items.get(key)
        return None if item is None else self._groups.get(_digest_in_batch(item))

    def _go_on_soon(self, digest: Digest) -> None:
        asyncio.get_running_loop().call_soon(self._go_on, digest)

    def _go_on(self, digest: Digest) -> None:
        """Answer one copy of an original that has ended, then let others work; without an answer
        the copy becomes the original, and after an error the others run beside it.
        """
        group = self._groups[digest]
        copy = next(iter(group.copies.values()), None)
        if copy is None:
            del self._groups[digest]
        elif group.answer is not None:
            self.leave(copy.claim.key)
            self._go_on_soon(digest)
            self._repeat(group.answer, copy)
        else:
            group.original = copy.claim.key
            for key in list(group.copies) if group.failed else [copy.claim.key]:
                self._waiting -= 1
                self._start(dataclasses.replace(group.prepared, claim=group.copies.pop(key).claim))

    def _keep(self, digest: Digest, kept: _KeptAnswer) -> None:
        if digest in self._kept:
            self._drop(digest)
        self._kept[digest] = kept
        self._kept_bytes += kept.size
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: Digest) -> None:
        self._kept_bytes -= self._kept.pop(digest).size


def _digest_in_batch(item: Prepared) -> Digest:
    return item.claim.key.batch, item.digest
