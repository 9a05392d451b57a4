"""The client's errors. A refusal of the server raises an error of `openai` instead.

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
