"""What a model gave for one input, and how bodies show it."""

from __future__ import annotations

import base64
import functools
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ENCODE = msgspec.json.Encoder().encode
_FEW = 16  # numbers; Python is faster with them
_SCALES = (1e12, 1e11, 1e10, 1e9, 1e8, 1e7)


class PooledVector:
    """Float32 numbers, in rows of one per token where `width` says how many a row has, else in one.

    Raise ValueError where one is no finite number.
    """

    def __init__(self, raw: bytes, width: int = 0) -> None:
        import numpy

        self.raw = raw
        row = numpy.frombuffer(raw, "<f4")
        if not numpy.isfinite(row).all():
            raise ValueError("the model gave something that is not a finite number")
        self._rows = row.reshape(-1, width) if width else row

    def numbers(self) -> list[float]:
        """Return the row."""
        return shortest(self._rows) if self._rows.size > _FEW else [float(str(number)) for number in self._rows]

    def encoded(self, encoding_format: str) -> msgspec.Raw | str:
        """Return it as a body contains it."""
        return base64.b64encode(self.raw).decode() if encoding_format == "base64" else self.json

    @functools.cached_property
    def json(self) -> msgspec.Raw:
        """The numbers as JSON, the shortest that is read back as the same float32."""
        return msgspec.Raw(_ENCODE(shortest(self._rows)))

    def cosine(self, other: PooledVector) -> PooledVector:
        """Return how alike two rows of length 1 are."""
        import numpy

        return PooledVector(numpy.float32(self._rows @ other._rows).tobytes())


def shortest(numbers: NDArray[numpy.float32]) -> Any:
    """Return, as lists, doubles that have few decimals and become the same float32 again.

    A number without any of up to 12 decimals is returned as it is. Each candidate is the double
    nearest to its decimals, since both parts of the quotient are exact.
    """
    import numpy

    exact = numbers.astype("f8")
    found = exact.copy()
    for scale in _SCALES:
        candidate = numpy.rint(exact * scale)
        candidate /= scale
        numpy.copyto(found, candidate, where=candidate.astype("f4") == numbers)
    return found.tolist()
