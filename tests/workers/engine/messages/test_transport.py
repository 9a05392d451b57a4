"""Frames on a socket pair."""

import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.support.waiting import wait_until
from workers.engine.messages.core import Failed, FromCore
from workers.engine.messages.transport import FrameReader, FrameSender, frame

SECONDS = 60.0


def test_a_client_that_does_not_read_blocks_nothing() -> None:
    """More than the socket holds is put at once; all of it arrives, in order."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        sent = [Failed(f"{number}" * 1000) for number in range(2000)]
        for message in sent:
            sender.put(message)
        reader, decoder = FrameReader(theirs), msgspec.msgpack.Decoder(FromCore)
        assert [reader.read(decoder) for _ in sent] == sent
        sender.close()


def test_what_the_socket_takes_is_sent_by_the_caller() -> None:
    """Also after the thread had to send some."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(SECONDS)
        sender, message = FrameSender(ours), Failed("why")
        sender.put(message)
        assert theirs.recv(100, socket.MSG_DONTWAIT) == frame(message)
        large = Failed("x" * 10_000_000)
        sender.put(large)
        assert FrameReader(theirs).read(msgspec.msgpack.Decoder(FromCore)) == large
        wait_until(lambda: not sender._unsent, SECONDS, "the end of the thread's work")
        sender.put(message)
        assert theirs.recv(100, socket.MSG_DONTWAIT) == frame(message)
        sender.close()


def test_frames_of_several_threads_stay_whole_and_in_order() -> None:
    """While the socket takes only a part of many of them."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(4) as pool:
        theirs.settimeout(SECONDS)
        sender = FrameSender(ours)

        def put_all(thread: int) -> None:
            for number in range(200):
                sender.put(Failed(f"{thread} {number} {'x' * (1000 * number)}"))

        threads = [pool.submit(put_all, thread) for thread in range(4)]
        reader, decoder = FrameReader(theirs), msgspec.msgpack.Decoder(FromCore)
        texts = [message.message.split() for _ in range(800) if (message := reader.read(decoder))]
        for one in threads:
            one.result()
        sender.close()
    for thread in range(4):
        assert [int(number) for name, number, *_ in texts if name == str(thread)] == list(range(200))


@pytest.mark.parametrize("gone", ["reader", "sender"])
def test_what_is_put_for_no_reader_is_dropped(gone: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        if gone == "reader":
            theirs.close()
            sender.put(Failed("why"))
            wait_until(lambda: sender._closed, SECONDS, "the end of the thread")
        else:
            sender.close()
        left = sender._rest.qsize()
        sender.put(Failed("why"))
        assert sender._rest.qsize() == left


def test_a_frame_that_ends_early_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(b"\x09\x00\x00\x00abc")
        assert FrameReader(theirs).read(msgspec.msgpack.Decoder(FromCore)) is None
