"""The socket that an API process listens on."""

import asyncio
import socket

from api.http.listening import listen


def test_what_is_written_goes_out_at_once() -> None:
    """With Nagle's algorithm on, an answer of two writes waits for the client's delayed
    acknowledgement, about 40 ms.
    """

    async def no_delay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(connected, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await asyncio.wait_for(accepted, 60)

    assert asyncio.run(no_delay()) != 0
