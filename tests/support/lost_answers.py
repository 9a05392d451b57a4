"""A bucket whose answer to a call is lost: it is carried out, and its caller learns nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

_CALLS = ("copy", "delete", "get", "head", "list_with_delimiter", "put")


@contextmanager
def lost_answer(number: int, away: bool, meanwhile: Callable[[], object] = int) -> Iterator[list[str]]:
    """Lose the answer of the call of that number, counted from 1, when `meanwhile` has come behind
    it; `away`: no later call arrives. Yield the names of the calls.
    """
    calls: list[str] = []

    def losing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if away and len(calls) > number:
                raise GenericError("error sending request")
            is_lost = len(calls) == number
            answer = call(*arguments, **options)
            if is_lost:
                meanwhile()
                raise GenericError("error sending request")
            return answer

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(obstore, name, losing(name, getattr(obstore, name)))
        yield calls
