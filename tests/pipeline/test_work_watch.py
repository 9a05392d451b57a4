"""When a server looks for work of models that it has not loaded."""

from jobs.queue.connection import MAX_BLOCK_SECONDS
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from pipeline.hosting.work_watch import ModelToWatch, WorkWatch
from tests.support.requests import request


def bells(queue: Queue, watch: WorkWatch) -> int:
    return len(queue.control_messages(watch.server, FIRST_ID, 0))


def test_work_rings_again_once_what_waited_was_taken_by_another_server(queue: Queue) -> None:
    watch = WorkWatch(queue)
    watch.tell({"a": ModelToWatch(("a",), OnDemandModel(watch.server))})
    assert watch.look() == MAX_BLOCK_SECONDS
    queue.submit("live_1", request("a"))
    assert bells(queue, watch) == 1
    for number in range(2, 6):
        assert 0 < watch.look() < MAX_BLOCK_SECONDS
        queue.submit(f"live_{number}", request("a"))
    assert bells(queue, watch) == 2  # of the second, in the middle of a look; of the others none
    assert len(queue.claim("w1", 1, 10, models=["a"])) == 5
    assert watch.look() == 0.0
    assert watch.look() == MAX_BLOCK_SECONDS
    queue.submit("live_6", request("a"))
    assert bells(queue, watch) == 3
    assert watch.take().works["a"].waiting == 0
    assert watch.look() < MAX_BLOCK_SECONDS
    assert watch.take().works["a"].waiting == 1
    watch.news.close()


def test_an_offer_is_not_repeated_after_it_was_taken_back(queue: Queue) -> None:
    watch = WorkWatch(queue)
    watch.tell({"a": ModelToWatch(("a",), OnDemandModel(watch.server))})
    watch.look()
    assert list(queue.on_demand()) == ["a"]
    watch.stop()
    assert watch.look() == 0.0
    assert queue.on_demand() == {}
    watch.news.close()
