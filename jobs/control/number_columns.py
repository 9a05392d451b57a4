"""Which columns of numbers a Parquet file of results has, and what a body says for them."""

import base64
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from jobs.batch.manifest import Manifest
from jobs.batch.parts import merge_parts
from jobs.protocol.endpoints import BATCH_ENDPOINTS

_CHECK_LINES = 256
_FLOAT_BYTES = 4


class _Item(msgspec.Struct):
    embedding: msgspec.Raw = msgspec.Raw(b"null")
    score: float | None = None


class _Numbers(msgspec.Struct):
    data: list[_Item] = []


_decode = msgspec.json.Decoder(_Numbers).decode
_decode_embedding = msgspec.json.Decoder(list[float] | str | None).decode


class NumberColumns(NamedTuple):
    """Which columns there are; an `embedding_size` of 0 is no column."""

    embedding_size: int = 0
    with_scores: bool = False

    def cells(self, body: bytes) -> dict[str, Any]:
        """Return what a row has in them, an embedding as the bytes of float32 numbers.

        Nothing for several inputs, and for an embedding of another size.
        """
        if not self.embedding_size and not self.with_scores:
            return {}
        item = _only_item(body)
        if self.with_scores and item.score is not None:
            return {"score": item.score}
        vector = _vector(item)
        return {"embedding": vector} if vector and len(vector) == self.embedding_size * _FLOAT_BYTES else {}


def number_columns(manifest: Manifest, check: Callable[[], None]) -> NumberColumns:
    """Return the columns for a batch's lines, calling `check` often; the first line with one
    embedding says how many numbers these have.
    """
    given = {BATCH_ENDPOINTS[url].number_column for url in manifest.endpoints}
    size = _first_size(manifest, check) if "embedding" in given else 0
    return NumberColumns(size, "score" in given)


def _first_size(manifest: Manifest, check: Callable[[], None]) -> int:
    for number, record in enumerate(merge_parts(manifest.spec.root, manifest.parts)):
        if number % _CHECK_LINES == 0:
            check()
        if record.result.succeeded and (vector := _vector(_only_item(record.result.body))):
            return len(vector) // _FLOAT_BYTES
    return 0


def _only_item(body: bytes) -> _Item:
    data = _decode(body).data
    return data[0] if len(data) == 1 else _Item()


def _vector(item: _Item) -> bytes:
    value = _decode_embedding(item.embedding)
    return base64.b64decode(value) if isinstance(value, str) else array("f", value or ()).tobytes()
