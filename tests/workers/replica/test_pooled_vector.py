"""Numbers as JSON and base64: read back they are the same, and no shorter text would be."""

import base64
import json
import random
import struct

import numpy
import pytest

from jobs.protocol.results import ApiError
from workers.replica.pooled_vector import PooledVector


def of(*numbers: float) -> PooledVector:
    return PooledVector(struct.pack(f"<{len(numbers)}f", *numbers))


def test_any_number_is_read_back_as_the_same() -> None:
    rng = random.Random(1)
    words = [rng.getrandbits(32) for _ in range(20_000)]
    row = numpy.array(words, "<u4").view("<f4")
    row = numpy.concatenate([row[numpy.isfinite(row)], numpy.float32([0.0, -0.0, 1.0, 1e-45, 3.4e38, 16777216.0])])
    vector = PooledVector(row.tobytes())
    assert numpy.array(json.loads(bytes(vector.json)), "<f4").tobytes() == row.tobytes()


def test_a_part_of_a_unit_vector_is_written_as_shortly_as_can_be() -> None:
    rng = numpy.random.default_rng(1)
    row = rng.standard_normal(384).astype("<f4")
    row /= numpy.linalg.norm(row)
    vector = PooledVector(row.tobytes())
    assert vector.numbers() == [float(str(number)) for number in row]
    assert json.loads(bytes(vector.json)) == vector.numbers()


def test_rows_of_tokens_are_lists() -> None:
    assert bytes(PooledVector(of(0.1, 2, 3, 4).raw, 2).json) == b"[[0.1,2.0],[3.0,4.0]]"


def test_any_float16_is_read_back_as_the_same() -> None:
    row = numpy.arange(1 << 16).astype("<u2").view("<f2")
    row = row[numpy.isfinite(row)]
    vector = PooledVector(row.astype("<f4").tobytes(), dtype="float16")
    assert base64.b64decode(str(vector.encoded("base64"))) == row.tobytes()
    assert numpy.array(json.loads(bytes(vector.json)), "<f2").tobytes() == row.tobytes()
    few = PooledVector(row[:16].astype("<f4").tobytes(), dtype="float16")
    assert numpy.array(few.numbers(), "<f2").tobytes() == row[:16].tobytes()


def test_numbers_are_rounded_to_float16() -> None:
    vector = PooledVector(of(0.1, 1.0004, -3e-9, 65503.0).raw, 2, "float16")
    assert json.loads(bytes(vector.json)) == [[0.1, 1.0], [-0.0, 65504.0]]


def test_a_number_beyond_float16_is_refused_in_a_sentence() -> None:
    with pytest.raises(ApiError, match="too large for float16; ask for float32") as caught:
        PooledVector(of(0.5, 70000.0).raw, dtype="float16")
    assert (caught.value.status, caught.value.param) == (400, "embed_dtype")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_finite_number_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        of(1.0, number)
