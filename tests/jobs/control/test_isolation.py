"""No stuck job, huge file, slow input folder or tenant delays another tenant's small batch by more
than a second.

Each trouble is made by batches of the tenant `first`, for one control plane of real processes.
While it lasts, small batches of the tenant `second` run one after the other, the first of them as
soon as it began. The slowest of these is compared with what one takes without trouble.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pytest

from jobs.batch.client import BatchSpec, cancel_batch, create_batch, get_batch
from jobs.protocol.states import State
from jobs.queue.connection import connect
from tests.support.batch_steps import wait_for_batch
from tests.support.control_plane import Answering, control_plane, write_input
from tests.support.redis_server import running_server
from tests.support.slow_folders import SlowFolders
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

LIMIT_SECONDS = 1.0
SLOWEST_ALONE = 0.1
"""Where a small batch takes longer without trouble, the machine is slow or busy, and the limit
grows with that.
"""
ROUNDS = 3  # of the whole, of which the best counts: what a busy machine does to a time is to add
SMALL_ONES = 5
PATIENCE = 60.0


class Tenants:
    """What the two tenants do."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.client = connect(url)
        self.folders = SlowFolders(path / "slow")
        self._path = path
        self._count = 0
        self.of_first: list[str] = []

    def new_folder(self) -> Path:
        self._count += 1
        folder = self._path / str(self._count)
        folder.mkdir()
        return folder

    def write(self, lines: int, model: str, folder: Path | None = None) -> Path:
        """An input of lines that ask for `model`."""
        self._count += 1
        return write_input((folder or self.new_folder()) / f"{self._count}.jsonl", lines, model=model)

    def create(self, source: Path, model: str = "m", within: Path | None = None) -> str:
        """A batch of the first tenant whose own folder is within that one."""
        batch = self._create(source, model, "first", within or self.new_folder())
        self.of_first.append(batch)
        return batch

    def create_some(self, count: int, lines: int, model: str, whole: bool) -> Path:
        """As many batches; return the folder of their inputs, with their own folders if `whole`."""
        folder = self.new_folder()
        for _ in range(count):
            self.create(self.write(lines, model, folder), model, folder if whole else None)
        return folder

    def _create(self, source: Path, model: str, tenant: str, within: Path) -> str:
        root, output = (str(within / f"{source.stem}.{self._count}.{kind}") for kind in ("parts", "jsonl"))
        spec = BatchSpec(
            input=str(source), root=root, output=output, error_file="inline", models=(model,), tenant=tenant
        )
        self._count += 1
        return create_batch(self.client, spec).id

    def states(self) -> set[State]:
        """Return those of the first tenant's batches."""
        return {get_batch(self.client, batch).state for batch in self.of_first}

    def wait_for(self, state: State) -> None:
        """Wait until all of the first tenant are in that state."""
        wait_until(lambda: self.states() == {state}, 2 * PATIENCE, f"all to be {state}")

    def wait_fed(self, lines: int) -> None:
        """Wait until Redis has so many lines of each of the first tenant."""
        wait_until(
            lambda: all(get_batch(self.client, batch).waiting >= lines for batch in self.of_first),
            2 * PATIENCE,
            f"{lines} lines of each batch",
        )

    def time_small_ones(self, lasts: Callable[[], bool] = lambda: True) -> list[float]:
        """Seconds from the creation to the end of each of some that begin while that is true."""
        times: list[float] = []
        while len(times) < SMALL_ONES and lasts():
            source = self.write(10, "small")
            began = time.monotonic()
            batch = self._create(source, "small", "second", source.parent)
            assert wait_for_batch(self.client, batch, PATIENCE).completed == 10
            times.append(time.monotonic() - began)
        return times

    def end_all(self) -> None:
        """Release and cancel all of the first tenant, and wait for their end."""
        self.folders.release()
        for batch in self.of_first:
            if not get_batch(self.client, batch).ended:
                cancel_batch(self.client, batch)
        for batch in self.of_first:
            wait_for_batch(self.client, batch, 2 * PATIENCE)
        self.of_first.clear()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """One control plane for all of these tests."""
    with running_server() as server:
        tenants = Tenants(server.url, tmp_path_factory.mktemp("tenants"))
        environment = tenants.folders.environment
        with control_plane(server.url, environment=environment), Answering(server.url, models=("small",)):
            tenants.time_small_ones()  # once all processes are there
            try:
                yield tenants
            finally:
                tenants.folders.release()


@pytest.fixture
def tenants(plane: Tenants) -> Iterator[Tenants]:
    """The two, of whom none has a batch under way."""
    yield plane
    plane.end_all()


Trouble = Callable[[Tenants], AbstractContextManager[Callable[[], bool]]]
"""A context that makes the trouble, and yields a function that returns whether it lasts."""


def check_isolated(tenants: Tenants, what: str, trouble: Trouble) -> None:
    """The trouble adds less than a second to the slowest small batch."""
    delays = []
    for _ in range(ROUNDS):
        alone = tenants.time_small_ones()
        with trouble(tenants) as lasts:
            beside = tenants.time_small_ones(lasts)
        tenants.end_all()
        assert beside, "the trouble was over before a small batch began"
        delays.append(max(beside) - median(alone))
        print(f"{what}: {_listed(beside)} s beside it, {_listed(alone)} s without: {delays[-1]:+.2f} s")
        if delays[-1] < LIMIT_SECONDS * max(1.0, median(alone) / SLOWEST_ALONE):
            return
    raise AssertionError(f"{what}: a small batch is delayed by {min(delays):.2f} s")


def _listed(times: Sequence[float]) -> str:
    return " ".join(f"{seconds:.2f}" for seconds in times)


@pytest.mark.parametrize(
    ("count", "whole"),
    [(1, False), pytest.param(8, False, marks=pytest.mark.proof), pytest.param(8, True, marks=pytest.mark.proof)],
)
def test_stuck_jobs_in_every_state(tenants: Tenants, count: int, whole: bool) -> None:
    """They wait in vain for their input, or for any file of their batch."""

    @contextmanager
    def stuck(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        folders = tenants.folders
        with ExitStack() as answering:
            running = tenants.create_some(count, 6000, "running", whole)
            finalizing = tenants.create_some(count, 100, "finalizing", whole)
            tenants.wait_for("in_progress")
            tenants.wait_fed(100)
            for folder, model in ((running, "running"), (finalizing, "finalizing")):
                folders.block(folder)
                answering.enter_context(Answering(tenants.url, models=(model,), limit=500))
            validating = tenants.new_folder()
            folders.block(validating)
            for _ in range(count):
                tenants.create(tenants.write(10, "m", validating), within=validating if whole else None)
            places = (running, finalizing, validating)
            wait_until(lambda: all(map(folders.waiting, places)), PATIENCE, "a job to be stuck in each state")
            yield lambda: all(map(folders.waiting, places))
            assert all(map(folders.waiting, places))
            assert tenants.states() == {"in_progress", "validating", *({"finalizing"} if not whole else {})}
            folders.release()

    check_isolated(tenants, f"{count} jobs stuck in each state", stuck)


@pytest.mark.parametrize(
    ("count", "lines"),
    [
        (20, 10),
        pytest.param(100, 10, marks=pytest.mark.proof),
        pytest.param(40, 40_000, marks=pytest.mark.proof),
    ],
)
def test_many_stuck_validations(tenants: Tenants, count: int, lines: int) -> None:
    @contextmanager
    def stuck(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        source = tenants.write(lines, "m")
        tenants.folders.block(source)
        for _ in range(count):
            tenants.create(source)
        wait_until(lambda: tenants.folders.waiting(source), PATIENCE, "a job to be stuck")
        yield lambda: True
        assert tenants.states() == {"validating"}
        tenants.folders.release()

    check_isolated(tenants, f"{count} stuck validations of {lines} lines", stuck)


@pytest.mark.parametrize("lines", [pytest.param(150_000, marks=pytest.mark.proof)])
def test_huge_files_that_are_validated(tenants: Tenants, lines: int) -> None:
    source = tenants.write(lines, "m")

    @contextmanager
    def validating(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        for _ in range(8):
            tenants.create(source)
        yield lambda: "validating" in tenants.states()

    check_isolated(tenants, f"8 files of {lines} lines being validated", validating)


@pytest.mark.parametrize("lines", [pytest.param(80_000, marks=pytest.mark.proof)])
def test_huge_files_that_run(tenants: Tenants, lines: int) -> None:
    source = tenants.write(lines, "m")

    @contextmanager
    def running(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        for _ in range(8):
            tenants.create(source)
        tenants.wait_for("in_progress")
        with Answering(tenants.url, models=("m",), limit=500) as worker:
            wait_until(lambda: worker.answered > 8 * 4096, PATIENCE, "more lines to be fed")
            yield lambda: tenants.states() == {"in_progress"}

    check_isolated(tenants, f"8 batches of {lines} lines running", running)


@pytest.mark.parametrize("lines", [pytest.param(80_000, marks=pytest.mark.proof)])
def test_huge_files_that_are_finalized(tenants: Tenants, lines: int) -> None:
    source = tenants.write(lines, "m")

    @contextmanager
    def finalizing(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        for _ in range(8):
            tenants.create(source)
        tenants.wait_for("in_progress")
        for batch in tenants.of_first:
            cancel_batch(tenants.client, batch)
        yield lambda: "cancelling" in tenants.states()

    check_isolated(tenants, f"8 batches of {lines} lines being finalized", finalizing)


@pytest.mark.parametrize(
    ("count", "seconds", "whole"),
    [
        pytest.param(8, 0.05, False, marks=pytest.mark.proof),
        pytest.param(8, 0.05, True, marks=pytest.mark.proof),
    ],
)
def test_slow_input_folders(tenants: Tenants, count: int, seconds: float, whole: bool) -> None:
    """Each line of a batch that runs there is a slow read."""

    @contextmanager
    def slow(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        folder = tenants.create_some(count, 10_000, "m", whole)
        tenants.wait_for("in_progress")
        tenants.folders.slow(folder, seconds)
        with Answering(tenants.url, models=("m",), limit=500):
            wait_until(lambda: tenants.folders.waiting(folder), PATIENCE, "a slow read")
            yield lambda: tenants.states() == {"in_progress"}
            tenants.folders.release()

    check_isolated(tenants, f"{count} batches in a folder that takes {seconds} s a read", slow)


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.proof)])
def test_many_small_batches_of_one_tenant(tenants: Tenants, count: int) -> None:
    @contextmanager
    def flood(tenants: Tenants) -> Iterator[Callable[[], bool]]:
        folder = tenants.new_folder()
        tenants.folders.block(folder)  # until all are there
        for _ in range(count):
            tenants.create(tenants.write(10, "m", folder))
        with Answering(tenants.url, models=("m",)):
            tenants.folders.release()
            yield lambda: tenants.states() != {"completed"}

    check_isolated(tenants, f"{count} small batches queued at once", flood)
