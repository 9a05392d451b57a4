"""Logging of every process: one line each on stderr, with the time, the level and the process'
name.
"""

import logging
import sys


def configure_logs(process: str, level: str = "info") -> None:
    """Sends this process' log to stderr as `10:31:02 worker-0 INFO text`; at the level debug times
    have milliseconds.
    """
    time = "%(asctime)s.%(msecs)03d" if level == "debug" else "%(asctime)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{time} {process} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    http = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "huggingface_hub")
    for noisy in (*http, "uvicorn.error", "filelock", "rq.worker", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))
