"""A kill at one exact point, inside the test's own process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Raised where a process is to be killed; nothing may catch it on the way out."""


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
    among: Callable[[tuple[Any, ...]], bool] = lambda arguments: True,
) -> Iterator[None]:
    """Fail unless what runs within is killed at its first call of `owner.name`, before or after it;
    of calls whose arguments are `among` those meant.
    """
    real = getattr(owner, name)

    def die(*arguments: Any, **options: Any) -> Any:
        if not among(arguments):
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            yield
