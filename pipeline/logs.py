"""Log of every process: one line per record on stderr, with the time, the process and the level."""

import logging
import sys
from typing import TextIO


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Write to the stderr of the moment, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure_logs(process: str, level: str = "info") -> None:
    """Send this process' log to stderr as `10:31:02 worker-0 INFO text`.

    At level debug, times have milliseconds.
    """
    time = "%(asctime)s.%(msecs)03d" if level == "debug" else "%(asctime)s"
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(f"{time} {process} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    http = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "huggingface_hub")
    for noisy in (*http, "uvicorn.error", "filelock", "rq.worker", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))
