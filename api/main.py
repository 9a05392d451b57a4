"""Runs one API process."""

import logging
import signal
import socket
from types import FrameType

import uvicorn

from api.app import create_app
from api.http.http_protocol import HttpProtocol
from api.settings import ApiSettings

_STOP_SECONDS = 10

logger = logging.getLogger(__name__)


def main(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raise OSError if the address cannot be listened on."""
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    signal.signal(signal.SIGTERM, _exit)  # which uvicorn raises again when it has stopped
    config = uvicorn.Config(
        create_app(settings),
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError whose text names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where TCP is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
