"""`python -m workers.main`: one worker, with the flags that tests and scripts need. `pipeline worker` has them all."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from jobs.settings import QueueSettings
from workers.engine.config import EngineConfig
from workers.settings import DEMO_MODEL, WorkerSettings
from workers.worker import main


def read_settings(arguments: list[str]) -> WorkerSettings:
    parser = argparse.ArgumentParser(prog="python -m workers.main", description="Runs one worker.")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--tokenizer")
    parser.add_argument("--served-model-name", action="append", default=[])
    parser.add_argument("--chat-template")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--lease-seconds", type=float)
    parser.add_argument("--stream-interval", type=float)
    parser.add_argument("--shutdown-timeout", type=float, default=10.0)
    parser.add_argument("--parent", type=int, help="process id; the worker dies with it")
    given = parser.parse_args(arguments)
    queue = {name: value for name in ("lease_seconds", "stream_interval") if (value := getattr(given, name)) is not None}
    return WorkerSettings(
        redis_url=given.redis_url,
        engine=EngineConfig(
            model=given.model,
            tokenizer=given.tokenizer,
            dtype=given.dtype,
            device=given.device,
            max_model_len=given.max_model_len,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            block_size=given.block_size,
            enable_prefix_caching=given.enable_prefix_caching,
            kv_cache_memory_bytes=given.kv_cache_memory_bytes,
        ),
        queue=QueueSettings(**queue),
        served_model_names=tuple(given.served_model_name),
        chat_template=given.chat_template,
        shutdown_timeout=given.shutdown_timeout,
        parent=given.parent,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s worker-{os.getpid()} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    sys.exit(main(read_settings(sys.argv[1:])))
