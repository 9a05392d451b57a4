"""How long no worker is placed after some have failed."""

from pipeline.ray.placement import PlacedModel
from pipeline.ray.scale import Scale
from pipeline.ray.spec import ModelSpec, WorkerSpec


def placed_model() -> PlacedModel:
    worker = WorkerSpec([], {}, "1", "info", 1.0, 1.0, 0, 1, {})
    spec = ModelSpec("m", ["m"], worker, 0, 4, None, 60.0)
    return PlacedModel(spec, worker.packed(), {}, Scale(0, 4, 10, 60.0), worker.digest())


def test_the_pause_grows_with_each_round_up_to_a_limit() -> None:
    model, now, pauses = placed_model(), 0.0, []
    for _ in range(2000):
        pause = model.fail("bad", now, now + 1)
        assert pause is not None
        pauses.append(pause)
        now = model.retry_at
    assert pauses[:5] == [5.0, 10.0, 20.0, 40.0, 60.0]
    assert set(pauses[5:]) == {60.0}


def test_workers_of_one_round_count_once() -> None:
    model = placed_model()
    assert [model.fail("bad", 10.0, moment) for moment in (11.0, 11.0, 17.0)] == [5.0, None, None]
    assert model.fail("bad", 18.0, 19.0) == 10.0


def test_a_worker_that_fails_after_a_long_time_is_the_first_again() -> None:
    model = placed_model()
    assert model.fail("bad", 10.0, 11.0) == 5.0
    assert model.fail("bad", 10.0, 1000.0) == 5.0


def test_log_level_and_time_to_stop_make_no_other_worker() -> None:
    worker = WorkerSpec(["--dtype", "float32"], {}, "1", "info", 1.0, 1.0, 0, 1, {})
    assert worker.digest() == WorkerSpec(["--dtype", "float32"], {}, "1", "debug", 9.0, 1.0, 0, 1, {}).digest()
    assert worker.digest() != WorkerSpec(["--dtype", "float32"], {}, "2", "info", 1.0, 1.0, 0, 1, {}).digest()
