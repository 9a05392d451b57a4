"""The HTTP layer below the app: what is no request at all gets OpenAI's shape and a request id
too.
"""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jobs.protocol.results import ApiError, encode_json, new_request_id


class HttpProtocol(H11Protocol):
    """uvicorn's, but for the answer that it gives without asking the app."""

    def send_400_response(self, msg: str) -> None:
        body = encode_json(ApiError(400, msg, code="invalid_http_request").body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("x-request-id", new_request_id()),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
