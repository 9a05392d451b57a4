"""Rows of Ray Data that a server answers."""

import subprocess
import sys

import numpy
import pandas
import pyarrow
import pytest

from batch_inference_pipeline import Rows
from pipeline.ray import Predictor
from tests.support.commands import REPOSITORY, command_environment

TABLE = pyarrow.table({"first": [2, 3, 4], "last": [5, 6, 7]})
ROWS = Rows(template="Count from {first} to {last}.")
ANSWERS = ["Count: 2, 3, 4, 5", "Count: 3, 4, 5, 6", "Count: 4, 5, 6, 7"]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(ROWS, parameters={"temperature": 0, "max_tokens": 40}, dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "numpy"])
def test_a_batch_of_each_format_gets_its_answers_in_order(predictor: Predictor, kind: str) -> None:
    frames = {
        "pyarrow": TABLE,
        "pandas": pandas.DataFrame(TABLE.to_pydict()),
        "numpy": {name: numpy.array(values) for name, values in TABLE.to_pydict().items()},
    }
    answered = predictor(frames[kind])
    assert answered.column_names == ["first", "last", "answer", "error"]
    assert answered.select(["first", "last"]).to_pydict() == TABLE.to_pydict()
    assert answered["answer"].to_pylist() == ANSWERS
    assert answered["error"].to_pylist() == [None] * 3


def test_a_row_without_an_answer_has_the_reason_as_its_error(predictor: Predictor) -> None:
    answered = predictor({"first": ["2", "4 " * 20_000], "last": ["5", "7"]})
    assert [answer is None for answer in answered["answer"].to_pylist()] == [False, True]
    assert "context length" in answered["error"].to_pylist()[1]


SCRIPT = """
import ray
from batch_inference_pipeline import Rows
from pipeline.ray import Predictor

ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
rows = [{"first": first, "last": first + 3} for first in range(20)]
answered = ray.data.from_items(rows, override_num_blocks=2).map_batches(
    Predictor,
    fn_constructor_args=(Rows(template="Count from {first} to {last}."),),
    fn_constructor_kwargs={"parameters": {"temperature": 0, "max_tokens": 40}, "device": "cpu"},
    batch_size=10,
    concurrency=1,
)
for row in sorted(answered.take_all(), key=lambda row: row["first"]):
    print(row["first"], row["answer"], row["error"])
"""


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_it_is_a_stage_of_ray_data() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=command_environment(None, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [str(first) for first in range(20)]
    assert "2 Count: 2, 3, 4, 5 None" in done.stdout
