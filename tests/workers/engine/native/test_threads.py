"""The kernels' own threads: one pool for all callers, which a fork, an idle engine and the end of a
process leave in order.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.waiting import wait_until
from tests.workers.engine.native.available import needs_native
from workers.engine.native.packed import PackedMatrix

pytestmark = needs_native
TASKS = Path("/proc/self/task")
FORKED = """
import os, torch
from workers.engine.native.packed import PackedMatrix
torch.set_num_threads(3)
generator = torch.Generator().manual_seed(0)
matrix, x = PackedMatrix(torch.randn(256, 64, generator=generator)), torch.randn(40, 64, generator=generator)
before = matrix(x)
child = os.fork()
if not child:
    os._exit(0 if matrix(x).equal(before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert matrix(x).equal(before)
"""


@pytest.fixture
def product() -> tuple[PackedMatrix, torch.Tensor]:
    return PackedMatrix(torch.randn(256, 64)), torch.randn(40, 64)


def test_a_product_is_the_same_by_any_number_of_threads(product: tuple[PackedMatrix, torch.Tensor]) -> None:
    matrix, x = product
    torch.set_num_threads(1)
    alone = matrix(x)
    for threads in (2, 5, 3):
        torch.set_num_threads(threads)
        assert matrix(x).equal(alone)


def test_threads_sleep_once_there_is_no_work_and_take_no_signals(product: tuple[PackedMatrix, torch.Tensor]) -> None:
    matrix, x = product
    before = {task.name for task in TASKS.iterdir()}
    torch.set_num_threads(len(before) + 4)  # more than any test before started
    matrix(x)
    new = [task for task in TASKS.iterdir() if task.name not in before]
    assert new
    for task in new:
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1
    wait_until(lambda: all(state(task) == "S" for task in new), 30, "the threads to sleep")
    assert matrix(x).equal(matrix(x))


def test_a_child_of_fork_computes_and_a_process_ends() -> None:
    run = [sys.executable, "-c", FORKED]
    root = Path(__file__).parents[4]
    done = subprocess.run(run, cwd=root, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
