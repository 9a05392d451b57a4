"""Tell the fleet why a worker could not load its model, in words for clients."""

import logging
import re
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import redis

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from workers.engine.messages.errors import DETAILS_HINT
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
# The folders of a path, and not those of a URL
_FOLDERS = re.compile(r"""(?<![\w.:/-])(?:~|\.{1,2})?/(?:[^\s/:,;'"`()]+/)*""")


def note_load_failure(settings: WorkerSettings, error: object) -> None:
    """Note in Redis why the model of these settings could not be loaded, if Redis answers."""
    assert settings.redis_url is not None
    with suppress(redis.RedisError, QueueUnavailable), closing(connect(settings.redis_url)) as client:
        queue = Queue(client, replace(settings, redis_retry_seconds=_RETRY_SECONDS))
        queue.note_load_failure(settings.models, _public(settings.engine.model, str(error)))


def _public(model: str, reason: str) -> str:
    """Return the reason on one line, without the folders of this machine."""
    named = reason.removesuffix(DETAILS_HINT).replace(model, Path(model).name)
    return _FOLDERS.sub("", " ".join(named.split())).rstrip(".")
