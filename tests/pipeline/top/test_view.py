"""Frames of `pipeline top`: what they say, and that they fit any window."""

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from jobs.queue import keys
from jobs.queue.batch_fields import RISKS
from jobs.queue.gauges import GpuGauges, MetricDescriptor, MetricSample, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from pipeline.top.rates import Rates
from pipeline.top.sample import take_sample
from pipeline.top.view import FIGURES, Frame, shared
from tests.support.requests import MODEL, finished, request, start_batch
from workers.replica.statistics import declared_metrics

URL = "redis://queue.example:6379/0"
METRICS = [MetricDescriptor(name, "", "gauge") for name in FIGURES]
EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]m[/]\r\n"


def render(
    queue: Queue,
    width: int = 140,
    height: int | None = None,
    trouble: str = "",
    meanwhile: Callable[[], object] = lambda: None,
) -> list[str]:
    """The lines of a frame of two samples, as a terminal without colors gets them."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None, markup=True, record=True)
    rates = Rates()
    rates.add(take_sample(queue)._replace(taken=1.0))
    meanwhile()
    sample = take_sample(queue)._replace(taken=2.0)
    rates.add(sample)
    console.print(Frame(sample, rates, URL, trouble, in_window=height is not None))
    return [line.rstrip() for line in console.export_text().split("\n")[:-1]]


def add_worker(queue: Queue, name: str, *gpus: GpuGauges, model: str = MODEL, host: str = "host") -> None:
    queue.register_worker(WorkerRecord(name, [model], "ready", 128, time.time(), host, 1, METRICS))
    samples = [[MetricSample("", value)] for value in (0.25, 30.0, 120.0)]
    queue.report_gauges(name, WorkerGauges(7, 2, 1234.5, list(gpus), samples))


def add_work(queue: Queue) -> None:
    """A batch of which three of four lines ended, one of them badly, and a live call that waits."""
    start_batch(queue, "batch_a", 4)
    queue.announce("", "batch_a", listed=False, runs=True)
    claims = queue.claim("w", 1, 3, models=[MODEL])
    queue.commit("w", [finished(claim, status=500 if claim.key.line == 0 else 200) for claim in claims])
    queue.submit("live_a", request())


def row(lines: list[str], start: str) -> list[str]:
    [found] = [line for line in lines if line.startswith(start)]
    return found.split()


def test_an_empty_fleet_is_shown(queue: Queue) -> None:
    lines = render(queue)
    assert lines[0] == f"{URL}  Redis answers  0 workers  0 tokens/s  0.0 requests/s"
    assert [line for line in lines if line.startswith("no ")] == [
        "no batch is at work or has ended",
        "no model is known",
        "no worker is alive",
    ]


def test_batches_queues_and_workers_are_shown(queue: Queue) -> None:
    add_worker(queue, "w1")
    queue.register_worker(WorkerRecord("w2", ["m"], "loading", 0, time.time(), "host", 1))
    add_work(queue)
    lines = render(queue)
    assert lines[0] == f"{URL}  Redis answers  2 workers  1,234 tokens/s  0.0 requests/s"
    batch = row(lines, "batch_a")
    assert (batch[1], *batch[3:]) == ("in_progress", "2", "1", "4", "0.0", "–")
    queues = row(lines, "m ")
    assert (queues[1], queues[4], queues[-1]) == ("1", "1", "0")
    assert row(lines, "w1")[1:] == ["m", "ready", "7", "2", "1,234", "25%", "25%"]
    assert row(lines, "w2")[1:] == ["m", "loading", *"–––––"]


def test_the_oldest_ages_and_the_time_left_are_shown(queue: Queue) -> None:
    add_worker(queue, "w1")
    start_batch(queue, "batch_a", 10)
    queue.announce("", "batch_a", listed=False, runs=True)
    ended = [finished(claim) for claim in queue.claim("w", 1, 4, models=[MODEL])]
    queue.submit("live_a", request())
    # As if they had come hours ago
    queue.redis.hset(keys.batch("batch_a"), "created_at", queue.now() - 2.5 * 3600)
    queue.redis.hincrby(keys.bodies("live_a"), "since", -round(3.5 * 3600_000))
    lines = render(queue, meanwhile=lambda: queue.commit("w", ended))
    assert row(lines, "batch_a")[-4:] == ["10", "4.0", "2", "s"]  # for six lines, at four a second
    assert row(lines, "m ") == ["m", "1", "3", "h", "6", "2", "h", "0"]


@pytest.mark.parametrize("risk", RISKS)
def test_a_batch_at_risk_is_shown(queue: Queue, risk: str) -> None:
    add_work(queue)
    queue.note_risks({"batch_a": risk})
    assert row(render(queue), "batch_a")[1] == risk
    queue.transition("batch_a", ["in_progress"], "finalizing")
    assert row(render(queue), "batch_a")[1] == "finalizing"


def test_an_open_batch_shows_how_long_ago_its_last_lines_came(queue: Queue) -> None:
    add_work(queue)
    queue.transition("batch_a", ["in_progress"], "in_progress", {"open": True})
    assert row(render(queue), "batch_a")[1:2] == ["open"]
    appended = {"appended": queue.now() - 3.5 * 3600}
    queue.transition("batch_a", ["in_progress"], "in_progress", {"timestamps": appended})
    assert row(render(queue), "batch_a")[1:4] == ["open", "3", "h"]
    queue.note_risks({"batch_a": "late"})
    assert row(render(queue), "batch_a")[1] == "late"
    queue.note_risks({"batch_a": ""})
    queue.transition("batch_a", ["in_progress"], "finalizing")
    assert row(render(queue), "batch_a")[1] == "finalizing"


def test_gpus_are_shown_where_there_are_any(queue: Queue) -> None:
    gpus = [GpuGauges("H200", f"GPU-{number}", 0.5, 60 << 30, 140 << 30) for number in range(2)]
    add_worker(queue, "w1", *gpus)
    add_worker(queue, "w2", GpuGauges("MIG", "GPU-3"))
    lines = render(queue)
    assert row(lines, "w1")[-3:] == ["50%", "120/280", "GiB"]
    assert row(lines, "w2")[-2:] == ["–", "–"]


def test_the_figures_of_workers_are_metrics_that_they_declare() -> None:
    assert set(FIGURES) <= {metric.name for metric in declared_metrics()}


@pytest.mark.parametrize("height", [8, 12, 24, 50])
@pytest.mark.parametrize("width", [60, 80, 81, 100, 140, 300])
def test_a_frame_fits_its_window(queue: Queue, width: int, height: int) -> None:
    for number in range(30):
        add_worker(queue, f"a-host-with-a-long-name-{number}", GpuGauges("H200", "GPU", 0.5, 60 << 30, 140 << 30))
        start_batch(queue, f"batch_66120041c39a979f3af80b{number}", 1, model=f"organization/模型-{number}")
        queue.announce("", f"batch_66120041c39a979f3af80b{number}", listed=False, runs=True)
    lines = render(queue, width, height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= max(height, 10)  # without a row for each table there is nothing to show
    if height > 20:
        assert len(lines) == height
    assert sum(bool(re.fullmatch(r"… \d+ more", line)) for line in lines) == 3


@pytest.mark.parametrize(("width", "height"), [(1, 1), (10, 4), (40, 8)])
def test_a_window_without_room_is_drawn_as_far_as_it_goes(queue: Queue, width: int, height: int) -> None:
    add_worker(queue, "w1")
    add_work(queue)
    assert max(map(cell_len, render(queue, width, height))) <= width


def test_at_80_columns_no_number_is_cut(queue: Queue) -> None:
    add_worker(queue, "a-host-with-a-long-name-17-a1b2c3", GpuGauges("H200", "GPU", 1.0, 60 << 30, 140 << 30))
    queue.create_batch("batch_66120041c39a979f3af80b25", 10_000_000, state="in_progress", fields={"completed": 999_999})
    queue.announce("", "batch_66120041c39a979f3af80b25", listed=False, runs=True)
    lines = render(queue, 80, 24)
    cut = [line for line in lines[1:] if "…" in line]  # and of the first line the address
    assert len(cut) == 2
    assert all(line.rindex("…") == 0 for line in cut)
    [batch] = [line for line in lines if "in_progress" in line]
    assert batch.split()[0].endswith("f3af80b25")  # ids differ at their end
    assert {"999999", "10000000"} <= set(batch.split())


def test_at_80_columns_models_of_one_family_differ(queue: Queue) -> None:
    sizes = ("8B", "70B")
    for size in sizes:
        gpu = GpuGauges("H200", "GPU", 1.0, 60 << 30, 140 << 30)
        add_worker(queue, f"a-host-with-a-long-name-{size}", gpu, model=f"meta-llama/Llama-3.1-{size}-Instruct")
    lines = render(queue, 80, 24)
    assert [sum(f"{size}-Instruct" in line for line in lines) for size in sizes] == [2, 2]  # a queue and a worker


def test_a_wide_window_shows_ids_whole_and_the_models_of_batches(queue: Queue) -> None:
    queue.create_batch("batch_66120041c39a979f3af80b25", 5, state="in_progress", fields={"line_models": ["a", "b"]})
    queue.announce("", "batch_66120041c39a979f3af80b25", listed=False, runs=True)
    assert row(render(queue, 140), "batch_66120041c39a979f3af80b25")[-2:] == ["a,", "b"]
    assert "a, b" not in "".join(render(queue, 80))


def test_text_of_others_neither_controls_the_terminal_nor_is_markup(queue: Queue) -> None:
    add_worker(queue, "w1", model=EVIL, host=EVIL)
    queue.create_batch("batch_a", 5, state="in_progress", fields={"line_models": [EVIL]})
    queue.announce("", "batch_a", listed=False, runs=True)
    lines = render(queue, 200, trouble=EVIL)
    shown = "\ufffd[2J\ufffd]0;owned\ufffd[bold red]m[/]\ufffd\ufffd"
    assert all(line.isprintable() for line in lines)
    assert sum(shown in line for line in lines) == 4  # the first line, the batch, the queue, the worker


def test_trouble_takes_the_place_of_the_figures(queue: Queue) -> None:
    lines = render(queue, trouble="no answer from Redis for 5 s")
    assert lines[0] == f"{URL}  no answer from Redis for 5 s"
    assert "no worker is alive" in lines


@pytest.mark.parametrize(
    ("room", "wanted", "given"),
    [(9, [20, 1, 3], [5, 1, 3]), (30, [2, 1, 3], [2, 1, 3]), (2, [5, 5, 5], [1, 1, 0]), (-3, [5, 1], [0, 0])],
)
def test_rows_are_shared_out(room: int, wanted: list[int], given: list[int]) -> None:
    assert shared(room, wanted) == given
