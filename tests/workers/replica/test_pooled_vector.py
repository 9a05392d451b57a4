"""Numbers of float32 as JSON: read back they are the same, and no shorter text would be."""

import json
import random
import struct

import numpy
import pytest

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


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_finite_number_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        of(1.0, number)
