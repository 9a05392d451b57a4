"""Workers of the last version and of this one give a batch's lines the same defaults."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.waiting import wait_until
from tests.upgrades.mixed_fleet import Client, MixedFleet, line
from tests.upgrades.versions import unpack_previous
from workers.settings import DEMO_MODEL

pytestmark = pytest.mark.proof

TOKENS = 40


def test_lines_have_the_defaults_of_their_validation_on_workers_of_both_versions(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "demo"))
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": TOKENS}))
    (tmp_path / "previous").mkdir()
    previous = unpack_previous(tmp_path / "previous")
    with TemporaryDirectory(prefix="defaults-") as name, ExitStack() as stack:
        fleet = MixedFleet(Path(name), stack)
        client = Client(fleet.start_api("api"))
        fleet.start_jobs("jobs")
        for worker, tree in (("new", None), ("old", previous)):
            fleet.start_worker(worker, tree, "--model", model, "--served-model-name", "demo", "--max-num-seqs", 2)
            fleet.wait_serving(worker)
        client.wait_ready()
        batch = client.create("unset", [without_limit(number) for number in range(300)])
        wait_until(lambda: client.batch(batch)["request_counts"]["completed"] >= 50, 100, "some lines to be done")
        fleet.stop("new")
        wait_until(lambda: client.batch(batch)["status"] == "completed", 250, "the old worker to do the others")
        assert client.answer_lengths(batch) == [TOKENS] * 300, fleet.logs()


def without_limit(number: int) -> str:
    """A line whose length is the model's default."""
    made = json.loads(line(f"c{number}", 1))
    del made["body"]["max_tokens"]
    return json.dumps(made)
