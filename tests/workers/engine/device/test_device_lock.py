"""GPUs are taken by one holder at a time, all or none, and given back by whatever ends their
holder. Real processes, no GPU.
"""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.commands import REPOSITORY
from workers.engine.device.device import take_devices
from workers.engine.device.device_lock import shared_folder, take_gpus
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError

GPUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
_TAKER = """
import sys
from workers.engine.device.device_lock import take_gpus
folder, count, *names = sys.argv[1:]
print(*take_gpus(names, int(count), folder).indices, flush=True)
sys.stdin.read()
"""


# Says so whenever it looks which GPUs are free.
_LOUD_TAKER = f"""
import sys
def report(event, arguments):
    if event == "open" and str(arguments[0]).endswith("-choosing.lock"):
        print("looks", flush=True)
sys.addaudithook(report)
{_TAKER}"""


class Taker:
    """A process that takes GPUs and holds them until its stdin ends."""

    def __init__(self, folder: Path, count: int, names: Sequence[str] = GPUS, program: str = _TAKER) -> None:
        self._names = list(names)
        arguments = [sys.executable, "-c", program, str(folder), str(count), *names]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def taken(self) -> set[str]:
        while (said := self.said()) == "looks":
            pass
        return {self._names[int(index)] for index in said.split()}

    def leave(self) -> None:
        self.process.communicate()


def test_processes_that_race_get_different_gpus(tmp_path: Path) -> None:
    """Each sees the GPUs in another order, as under another CUDA_VISIBLE_DEVICES."""
    takers = [Taker(tmp_path, 1, GPUS[first:] + GPUS[:first]) for first in range(4)]
    assert sorted(gpu for taker in takers for gpu in taker.taken()) == GPUS
    for taker in takers:
        taker.leave()


def test_pairs_that_race_wait_for_each_other_without_holding_half(tmp_path: Path) -> None:
    takers = [Taker(tmp_path, 2, GPUS[:3]), Taker(tmp_path, 2, GPUS[2::-1])]

    def hold(taker: Taker) -> int:
        taken = len(taker.taken())
        taker.leave()
        return taken

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(hold, takers)) == [2, 2]


def test_a_killed_holder_releases_its_gpu_once_its_children_have_ended(tmp_path: Path) -> None:
    held = take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=held.fds
    )
    held.release()
    with pytest.raises(ModelLoadError, match="none of 1 is free"):
        take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0).release()


def test_a_process_may_take_again_what_it_has(tmp_path: Path) -> None:
    first, second = (take_gpus(GPUS, 2, str(tmp_path), wait_seconds=0) for _ in range(2))
    assert first.indices == second.indices == [0, 1]
    first.release()
    taker = Taker(tmp_path, 2)
    assert taker.taken() == {"GPU-c", "GPU-d"}
    second.release()
    third = Taker(tmp_path, 2)
    assert third.taken() == {"GPU-a", "GPU-b"}
    taker.leave()
    third.leave()


def test_a_refusal_names_the_holders_and_takes_nothing(tmp_path: Path) -> None:
    taker = Taker(tmp_path, 3)
    assert taker.taken() == set(GPUS[:3])
    with pytest.raises(ModelLoadError) as refusal:
        take_gpus(GPUS, 2, str(tmp_path), wait_seconds=0)
    holders = ", ".join(f"{gpu} is held by process {taker.process.pid} on {os.uname().nodename}" for gpu in GPUS[:3])
    expected = f"2 GPUs are needed, but only 1 of 4 is free: {holders}; stop one of those workers, or start fewer"
    assert str(refusal.value) == expected
    last = take_gpus(GPUS, 1, str(tmp_path), wait_seconds=0)
    assert last.indices == [3]
    last.release()
    taker.leave()


def test_a_refusal_counts_what_is_free(tmp_path: Path) -> None:
    held = take_gpus(GPUS, 1, str(tmp_path), wait_seconds=0)
    taker = Taker(tmp_path, 2)
    assert taker.taken() == {"GPU-b", "GPU-c"}
    held.release()
    with pytest.raises(ModelLoadError, match="3 GPUs are needed, but only 2 of 4 are free: GPU-b is held by"):
        take_gpus(GPUS, 3, str(tmp_path), wait_seconds=0)
    taker.leave()


def test_one_that_is_asked_for_by_number_is_that_one(tmp_path: Path) -> None:
    taker = Taker(tmp_path, 1, GPUS[2:])
    assert taker.taken() == {"GPU-c"}
    with pytest.raises(ModelLoadError, match="none of 1 is free: GPU-c is held"):
        take_gpus(GPUS, 1, str(tmp_path), index=2, wait_seconds=0)
    with pytest.raises(ModelLoadError, match="2 GPUs are needed, but there is one here"):
        take_gpus(GPUS, 2, str(tmp_path), index=1, wait_seconds=0)
    held = take_gpus(GPUS, 1, str(tmp_path), index=3, wait_seconds=0)
    assert held.indices == [3]
    held.release()
    taker.leave()


def test_a_gpu_is_waited_for(tmp_path: Path) -> None:
    held = take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0)
    taker = Taker(tmp_path, 1, GPUS[:1], _LOUD_TAKER)
    # The second time because the first was in vain
    assert [taker.said(), taker.said()] == ["looks", "looks"]
    held.release()
    assert taker.taken() == {"GPU-a"}
    taker.leave()


def test_a_lock_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0).release()
        assert len(list(tmp_path.iterdir())) == 2
        for file in tmp_path.iterdir():
            file.unlink()


def test_everybody_may_lock_what_one_has_made(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        take_gpus(GPUS[:1], 1, str(tmp_path), wait_seconds=0).release()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o666}
    assert stat.S_IMODE(shared_folder().stat().st_mode) & 0o007 == 0o007


@pytest.mark.gpu
def test_all_real_gpus_can_be_taken_once(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    config = EngineConfig(model="m", device="cuda", device_lock_folder=str(tmp_path), tensor_parallel_size=count)
    devices, held = take_devices(config)
    assert devices == [f"cuda:{index}" for index in range(count)]
    names = {file.name for file in tmp_path.iterdir() if "GPU-" in file.name}
    assert len(names) == count
    held.release()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"GPUs cannot be locked in .*/file: .*--device-lock-folder"):
        take_gpus(GPUS, 1, str(tmp_path / "file"), wait_seconds=0)
