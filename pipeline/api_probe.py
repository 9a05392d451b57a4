"""Health check of this host's API, over its port or Unix socket."""

import http.client
import socket
import ssl

from api.http_settings import HttpSettings

_TIMEOUT_SECONDS = 5.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def api_fault(settings: HttpSettings) -> str | None:
    """Return the reason why the API is unhealthy, or None."""
    connection = _ProbeConnection(settings)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"the API does not answer at {settings.uds or f'port {settings.port}'}: {error}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"the API answers {answer.status}: {text}"


class _ProbeConnection(http.client.HTTPConnection):
    """A connection to this host.

    The certificate is not checked, since it names the host as other hosts call it.
    """

    def __init__(self, settings: HttpSettings) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._settings = settings

    def connect(self) -> None:
        settings = self._settings
        if settings.uds is not None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(_TIMEOUT_SECONDS)
            self.sock.connect(settings.uds)
        else:
            host = _EVERY_ADDRESS.get(settings.host, settings.host)
            self.sock = socket.create_connection((host, settings.port), _TIMEOUT_SECONDS)
        if settings.ssl_certfile is not None:
            self.sock = _client_context(settings).wrap_socket(self.sock)


def _client_context(settings: HttpSettings) -> ssl.SSLContext:
    """Return a context that presents the server's own certificate if clients need one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if settings.ssl_cert_reqs and settings.ssl_certfile is not None:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    return context
