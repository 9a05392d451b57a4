"""How many workers a model is to have."""

from pipeline.ray.scale import Scale


def test_it_grows_at_once_within_its_bounds() -> None:
    scale = Scale(1, 4, 10, 60.0)
    assert [scale.target(requests, 0.0) for requests in (0, 1, 10, 11, 39, 1000)] == [1, 1, 1, 2, 4, 4]


def test_the_first_request_takes_one_worker_and_none_takes_none() -> None:
    scale = Scale(0, 4, 10, 60.0)
    assert scale.target(0, 0.0) == 0
    assert scale.target(1, 0.0) == 1


def test_it_shrinks_to_the_most_that_the_quiet_time_needed() -> None:
    scale = Scale(0, 4, 10, 60.0)
    needed = [(0.0, 40), (30.0, 15), (50.0, 0), (60.0, 0), (61.0, 0), (90.0, 0), (91.0, 5), (120.0, 0), (152.0, 0)]
    assert [scale.target(requests, now) for now, requests in needed] == [4, 4, 4, 4, 2, 2, 1, 1, 0]


def test_workers_that_are_there_already_stay_for_the_quiet_time() -> None:
    scale = Scale(0, 4, 10, 60.0)
    scale.note(3, 0.0)
    assert scale.target(0, 60.0) == 3
    assert scale.target(0, 61.0) == 0


def test_workers_above_the_most_do_not_stay() -> None:
    scale = Scale(0, 2, 10, 60.0)
    scale.note(5, 0.0)
    assert scale.target(0, 0.0) == 2
