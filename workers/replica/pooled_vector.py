"""Represent the model's output for one input, and encode it for response bodies."""

from __future__ import annotations

import base64
import functools
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.protocol.pooling_parameters import EMBED_DTYPES
from jobs.protocol.results import ApiError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ENCODE = msgspec.json.Encoder().encode
_FEW = 16  # numbers; for fewer, plain Python is faster
_SCALES = {"float32": (1e12, 1e11, 1e10, 1e9, 1e8, 1e7), "float16": (1e8, 1e7, 1e6, 1e5, 1e4, 1e3)}


class PooledVector:
    """Numbers of one pooled input: one row, or one row per token if `width` (numbers per row) is
    set.

    They arrive as float32 and are rounded to `dtype`. Raises ValueError for a number that is not
    finite, and ApiError for a number too large for the type.
    """

    def __init__(self, raw: bytes, width: int = 0, dtype: str = "float32") -> None:
        import numpy

        row: NDArray[numpy.floating] = numpy.frombuffer(raw, "<f4")
        if not numpy.isfinite(row).all():
            raise ValueError("the model gave something that is not a finite number")
        if dtype != "float32":
            row = _rounded(row, dtype)
            raw = row.tobytes()
        self.raw = raw
        self._rows = row.reshape(-1, width) if width else row

    def numbers(self) -> list[float]:
        """Return the row."""
        return shortest(self._rows) if self._rows.size > _FEW else [float(str(number)) for number in self._rows]

    def encoded(self, encoding_format: str) -> msgspec.Raw | str:
        """Return the numbers in the form of the response body."""
        return base64.b64encode(self.raw).decode() if encoding_format == "base64" else self.json

    @functools.cached_property
    def json(self) -> msgspec.Raw:
        """Return the numbers as JSON, with the fewest digits that read back as the same number."""
        return msgspec.Raw(_ENCODE(shortest(self._rows)))

    def cosine(self, other: PooledVector) -> PooledVector:
        """Return the cosine similarity of two rows of length 1."""
        import numpy

        return PooledVector(numpy.float32(self._rows @ other._rows).tobytes())


def _rounded(row: NDArray[numpy.floating], dtype: str) -> NDArray[numpy.floating]:
    import numpy

    with numpy.errstate(over="ignore"):
        rounded = row.astype(f"<{EMBED_DTYPES[dtype]}")
    if not numpy.isfinite(rounded).all():
        message = f"Invalid 'embed_dtype': the model gave a number that is too large for {dtype}; ask for float32."
        raise ApiError(400, message, param="embed_dtype", code="invalid_value")
    return rounded


def shortest(numbers: NDArray[numpy.floating]) -> Any:
    """Return doubles, as lists, with the fewest decimals that round back to the same numbers.

    A number that needs more decimals than tried is returned as it is. Each candidate is the double
    nearest to its decimals, since both parts of the quotient are exact.
    """
    import numpy

    exact = numbers.astype("f8")
    found = exact.copy()
    for scale in _SCALES[numbers.dtype.name]:
        candidate = numpy.rint(exact * scale)
        candidate /= scale
        numpy.copyto(found, candidate, where=candidate.astype(numbers.dtype) == numbers)
    return found.tolist()
