"""Run the engine core's process: `python -m workers.engine.core_process --fd N --parent PID`.

N is its end of a socket pair; the worker process PID has the other end.

It reads an `EngineConfig`, answers with `Ready` or `Failed`, then serves until the worker process
sends `Shutdown`, closes its end or dies.
"""

import argparse
import gc
import logging
import os
import socket
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import Failed, ToCore
from workers.engine.messages.transport import FrameReader, FrameSender
from workers.engine.process import become_child, bound_spinning, explains_itself, leave, loading, sentence, settle_heap

if TYPE_CHECKING:
    from workers.engine.core import EngineCore

_CONFIG_DECODER = msgspec.msgpack.Decoder(EngineConfig)
_DECODER = msgspec.msgpack.Decoder(ToCore)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="the worker process' id")
    parser.add_argument("--log-level", type=int, default=logging.INFO, help="as the logging module counts them")
    given = parser.parse_args()
    connection = socket.socket(fileno=given.fd)
    become_child(given.parent, connection, "core", given.log_level)
    reader = FrameReader(connection)
    config = reader.read(_CONFIG_DECODER)
    if config is None:
        return 0
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    cores: list[EngineCore] = []  # one, once it serves
    threading.Thread(target=_receive, args=(reader, inbox, cores), name="receive", daemon=True).start()
    sender = FrameSender(connection)
    try:
        _serve(config, inbox, sender, cores)
    except Exception as error:
        if not explains_itself(error):
            traceback.print_exc()
        sender.put(Failed(sentence(error)))
        return 1
    finally:
        sender.close()
    return 0


def _serve(config: EngineConfig, inbox: SimpleQueue[ToCore], sender: FrameSender, cores: "list[EngineCore]") -> None:
    bound_spinning()
    gc.disable()  # scanning the imported objects takes a sixth of the import time
    # Imported here, once messages are being received, since importing torch takes seconds.
    from workers.engine.core import EngineCore
    from workers.engine.device.executor import Executor
    from workers.engine.device.ranks import RankDeath, end_likewise

    gc.freeze()  # collections while the weights are read skip the imported objects
    gc.enable()

    def on_rank_death(death: RankDeath) -> None:
        if death.returncode >= 0:
            sender.put(Failed(death.sentence))
            sender.close()
        end_likewise(death)

    with loading(config.model):
        executor = Executor(config, on_rank_death)
        core = EngineCore(executor)
    settle_heap()
    cores.append(core)
    sender.put(core.ready)
    core.run(inbox, sender.put)
    executor.close()


def _receive(reader: FrameReader, inbox: SimpleQueue[ToCore], cores: "list[EngineCore]") -> None:
    status = 0
    try:
        while (message := reader.read(_DECODER)) is not None:
            inbox.put(message)
            for core in cores:
                core.interrupt_for(message)
    except msgspec.MsgspecError as error:
        print(f"a frame from the worker process could not be read: {error}", file=sys.stderr, flush=True)
        status = 1
    # No client is left to send a message or use a result.
    os._exit(status)


if __name__ == "__main__":
    leave(main())
