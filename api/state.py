"""What the routes of one API process share."""

from dataclasses import dataclass
from typing import cast

import redis.asyncio
from fastapi import Request

from api.fleet import Fleet
from api.reader import Reader
from api.settings import ApiSettings
from jobs.queue import Queue


@dataclass(frozen=True)
class ApiState:
    """Made when the app starts, closed when it ends."""

    settings: ApiSettings
    queue: Queue
    stream_client: redis.asyncio.Redis
    reader: Reader
    fleet: Fleet


def state_of(request: Request) -> ApiState:
    """The state of the app that got the request."""
    return cast(ApiState, request.app.state.pipeline)
