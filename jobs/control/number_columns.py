"""The columns of numbers in a Parquet file of results, and their values from a body."""

import base64
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from jobs.batch.manifest import Manifest
from jobs.batch.parts import merge_parts
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.pooling_parameters import EMBED_DTYPES

_CHECK_LINES = 256


class _Item(msgspec.Struct):
    embedding: msgspec.Raw = msgspec.Raw(b"null")
    score: float | None = None


class _Numbers(msgspec.Struct):
    data: list[_Item] = []
    embed_dtype: str = "float32"


_decode = msgspec.json.Decoder(_Numbers).decode
_decode_embedding = msgspec.json.Decoder(list[float] | str | None).decode


class NumberColumns(NamedTuple):
    """The columns of numbers; there is no embedding column if `embedding_size` is 0."""

    embedding_size: int = 0
    embedding_dtype: str = "float32"
    with_scores: bool = False

    def cells(self, body: bytes) -> dict[str, Any]:
        """Return a row's cells in these columns, an embedding as the bytes of its numbers.

        Empty for several inputs, and for an embedding of another size or type.
        """
        if not self.embedding_size and not self.with_scores:
            return {}
        numbers = _decode(body)
        item = _only_item(numbers)
        if self.with_scores and item.score is not None:
            return {"score": item.score}
        vector, dtype = _vector(item, numbers.embed_dtype), self.embedding_dtype
        fits = numbers.embed_dtype == dtype and len(vector) == self.embedding_size * _bytes_of(dtype)
        return {"embedding": vector} if vector and fits else {}


def number_columns(manifest: Manifest, check: Callable[[], None]) -> NumberColumns:
    """Return the columns for a batch's lines, calling `check` often.

    The first line with one embedding sets their size and type.
    """
    given = {BATCH_ENDPOINTS[url].number_column for url in manifest.endpoints}
    size, dtype = _first_embedding(manifest, check) if "embedding" in given else (0, "float32")
    return NumberColumns(size, dtype, "score" in given)


def _first_embedding(manifest: Manifest, check: Callable[[], None]) -> tuple[int, str]:
    """Return the size and type of the first embedding; size 0 if there is none."""
    for number, record in enumerate(merge_parts(manifest.spec.root, manifest.parts)):
        if number % _CHECK_LINES == 0:
            check()
        if not record.result.succeeded:
            continue
        numbers = _decode(record.result.body)
        if vector := _vector(_only_item(numbers), numbers.embed_dtype):
            return len(vector) // _bytes_of(numbers.embed_dtype), numbers.embed_dtype
    return 0, "float32"


def _only_item(numbers: _Numbers) -> _Item:
    return numbers.data[0] if len(numbers.data) == 1 else _Item()


def _vector(item: _Item, dtype: str) -> bytes:
    value = _decode_embedding(item.embedding) or []
    if dtype not in EMBED_DTYPES:  # from a newer worker
        return b""
    if isinstance(value, str):
        return base64.b64decode(value)
    return struct.pack(f"<{len(value)}{EMBED_DTYPES[dtype]}", *value)


def _bytes_of(dtype: str) -> int:
    return struct.calcsize(EMBED_DTYPES[dtype])
