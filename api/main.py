"""Run one API process."""

import contextlib
import gc
import logging
import signal
from functools import partial
from types import FrameType

from api.app import create_app
from api.http.listening import address, inherited, listening
from api.http.server import HttpServer
from api.settings import ApiSettings

logger = logging.getLogger(__name__)


def main(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raise OSError if the address cannot be listened on, and `SettingsError`.
    """
    with contextlib.ExitStack() as stack:
        given = inherited()
        listener, counts = given or (stack.enter_context(listening(settings)), None)
        server = HttpServer(create_app(settings), settings, settings.timeout_graceful_shutdown, counts)
        logger.info("listening on %s", address(listener, "https" if settings.ssl_certfile else "http"))
        signal.signal(signal.SIGTERM, partial(_stop, server))
        gc.collect()
        gc.freeze()  # objects of the imports stay; collecting them again would delay every stream
        gc.enable()
        server.run(sockets=[listener])


def _stop(server: HttpServer, number: int, frame: FrameType | None) -> None:
    """Stop a server that does not serve yet or any more: uvicorn raises the signal again then.

    An exception would be lost if it came up in a destructor.
    """
    server.should_exit = True
