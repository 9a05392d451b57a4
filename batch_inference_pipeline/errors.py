"""Why the client cannot do what was asked. What a server refuses is an error of `openai`.

ClientError
  ServerFailed      the processes that the client started do not serve
  BatchFailed       the server refused a batch when it checked its lines
  RequestFailed     one request has no answer; `result` has its line
"""


class ClientError(Exception):
    """Base of the client's errors; the message is one sentence."""


class ServerFailed(ClientError):
    """The processes that the client started do not serve."""


class BatchFailed(ClientError):
    """The server refused a batch when it checked its lines."""
