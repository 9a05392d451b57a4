"""Run one rank: `python -m workers.engine.device.rank_process --fd N --parent PID --rank R`.

N is this process' end of a socket pair; rank 0, process PID, holds the other.

The process reads a `RankSetup`, then runs the step of every `PlanFrame`, with the masks of a
`MaskFrame` if the step has guided samples, until rank 0 closes its end or dies. It sends only the
reason for its end.
"""

import argparse
import logging
import socket
import traceback
from collections import deque

import msgspec

from workers.engine.messages.ranks import MaskFrame, PlanFrame, RankFailed, RankSetup
from workers.engine.messages.step import NO_MASKS, TokenMasks
from workers.engine.messages.transport import FrameReader, frame
from workers.engine.process import become_child, explains_itself, leave, loading, sentence, settle_heap

_SETUP_DECODER = msgspec.msgpack.Decoder(RankSetup)
_PLAN_DECODER = msgspec.msgpack.Decoder(PlanFrame)
_MASKS_DECODER = msgspec.msgpack.Decoder(MaskFrame)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="rank 0's process id")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO, help="as the logging module counts them")
    given = parser.parse_args()
    connection = socket.socket(fileno=given.fd)
    # Rank 0 logs the same lines, so this rank logs errors only.
    become_child(given.parent, connection, f"rank {given.rank}", max(logging.ERROR, given.log_level))
    try:
        _serve(FrameReader(connection))
    except Exception as error:
        if not explains_itself(error):
            traceback.print_exc()
        connection.sendall(frame(RankFailed(sentence(error))))
        return 1
    return 0


def _serve(reader: FrameReader) -> None:
    # Importing torch takes seconds; rank 0 checks its device meanwhile.
    from workers.engine.device.model_runner import LaunchedStep
    from workers.engine.device.rank import Rank, open_shard
    from workers.engine.device.ranks import rank_parallel

    setup = reader.read(_SETUP_DECODER)
    if setup is None:
        return
    with loading(setup.config.model):
        rank = Rank(setup.config, open_shard(setup.config))
        config, _ = rank.settle(rank_parallel(setup, rank.device))
    settle_heap()
    launched: deque[LaunchedStep] = deque()

    def masks() -> TokenMasks:
        """Read the step's masks; return empty ones if rank 0 has ended and the step is lost."""
        received = reader.read(_MASKS_DECODER)
        return NO_MASKS if received is None else received.token_masks()

    while (message := reader.read(_PLAN_DECODER)) is not None:
        launched.append(rank.launch(message.plan(), masks if message.guided else None))
        if len(launched) > config.depth:
            rank.retire(launched.popleft())


if __name__ == "__main__":
    leave(main())
