"""The table of batch states."""

from typing import get_args

from jobs.control.runner import WORK
from jobs.protocol.states import END_STATES, STATES, EndState, JobName, State


def test_each_state_is_in_the_table() -> None:
    assert set(STATES) == set(get_args(State))
    assert set(get_args(EndState)) | {"failed"} == END_STATES


def test_a_state_has_a_job_or_is_final() -> None:
    assert [state for state, rule in STATES.items() if (rule.job is None) != rule.final] == []


def test_each_job_has_a_function() -> None:
    assert set(WORK) == set(get_args(JobName)) == {rule.job for rule in STATES.values() if rule.job}
