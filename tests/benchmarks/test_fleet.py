"""The benchmark of a fleet on one Redis at a small size, and what the page makes of its figures."""

from typing import Any

import pytest

from benchmarks import fleet, pages, redis_time
from benchmarks.fleet_plot import fleet_plot
from benchmarks.fleet_table import fleet_table, last_kept
from benchmarks.gpu_pace import QWEN3_06B, QWEN3_8B


def point(workers: int, done: int, asked: int, core: float) -> dict[str, Any]:
    limit = round(done / core)
    return {
        "workers": workers,
        "asked": asked,
        "lines_per_second": done,
        "redis_us_per_line": 50.0,
        "redis_core": core,
        "limit_lines_per_second": limit,
        "limit_gpus": limit // 100,
    }


FLEET = {"curves": {"100": [point(1, 100, 100, 0.01), point(8, 790, 800, 0.08), point(64, 5000, 6400, 0.5)]}}
TIMES = {"server": "Redis 7", "us_per_line": {"A": {"claim": 2.5, "all": 2.5}, "B": {"claim": 3.0, "all": 3.0}}}


@pytest.mark.parametrize("pace", [QWEN3_06B, QWEN3_8B])
def test_the_pace_of_a_gpu_makes_groups_of_a_workers_calls(pace: Any) -> None:
    tokens = 4 * pace.tokens_of_a_publish
    assert pace.lines_per_second(tokens) * pace.seconds(tokens) == pytest.approx(pace.slots)
    assert pace.published(tokens) == 3 * pace.tokens_of_a_publish
    assert pace.published(pace.tokens_of_a_publish) == 0
    assert min(pace.groups(100_000)) >= 1
    assert pace.groups(1).commit <= 500


def test_the_table_has_the_most_workers_that_keep_their_pace() -> None:
    assert last_kept(FLEET["curves"]["100"])["workers"] == 8
    text = fleet_table(TIMES, FLEET)
    assert "| claim | 2.5 | 3.0 |\n" in text
    assert "| 100 | 8 | 790 | 50.0 | 8% | 9,875 | 1.0 million | 98 |\n" in text
    assert fleet_table(None, None) == ""


def test_the_picture_has_every_point_and_hollow_ones_that_were_late() -> None:
    drawn = fleet_plot(FLEET)
    assert drawn.count("<circle") == 3
    assert drawn.count(' late"') == 1
    assert "100 tokens: 98 GPUs" in drawn


def test_the_page_says_where_nothing_was_measured(tmp_path: Any) -> None:
    assert pages.pages(tmp_path)[pages.SCALING].count(pages.NOT_MEASURED) == 1


@pytest.mark.proof
def test_workers_at_the_pace_of_a_gpu_end_their_lines() -> None:
    figures = fleet.measure(2, 16, 2, 1.0, 1)
    assert figures["lines_per_second"] > 0
    assert figures["tokens_per_second"] > figures["lines_per_second"]
    assert figures["redis_us_per_line"] > 0


@pytest.mark.proof
def test_each_step_of_a_lines_life_is_measured() -> None:
    figures = redis_time.measure(1000, 512)
    assert list(figures) == ["ingest", "claim", "publish", "commit", "drain"]
    assert min(figures.values()) > 0
