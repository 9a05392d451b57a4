"""Settings of the HTTP server: its address, its clients, its limits."""

import ipaddress
import json
import re
from dataclasses import dataclass

from jobs.errors import SettingsError
from jobs.queue.settings import QueueSettings
from jobs.settings import setting

ANY = "*"
PROBED = ("/health", "/ready", "/metrics")
"""Paths of probes and scrapers: open to every client, by default not logged, and never traced."""

ALIVE = "/version"
"""Path that is answered whenever the process can answer, for liveness probes."""

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\]))(:[0-9]+)?", re.IGNORECASE)
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def listed(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a flag that may be repeated, or given once as a JSON list.

    Raises ValueError for JSON that is no list of texts.
    """
    found: list[str] = []
    for value in values:
        if not value.startswith("["):
            found.append(value)
            continue
        try:
            items = json.loads(value)
        except ValueError:
            items = None
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{value!r} is no JSON list of texts")
        found += items
    return tuple(found)


def _check_origin(value: str) -> None:
    for origin in listed((value,)):
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin such as https://app.example.org, and not *")


def _as_browsers_send(origin: str) -> str:
    """Return an origin as browsers write it: in small letters, without the default port."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None:
        return origin
    scheme = found[1].partition(":")[0]
    return found[1] if found[2] == _USUAL_PORTS.get(scheme) else found[0]


def _check_token(value: str) -> None:
    for token in listed((value,)):
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} is no name of a method or a header, and not *")


def _check_path(value: str) -> None:
    if value and (not value.startswith("/") or value.endswith("/") or not value.isascii()):
        raise ValueError(f"{value!r} is no path such as /models, with a slash in front and none behind")


def _check_paths(value: str) -> None:
    for path in filter(None, value.split(",")):
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is no path such as /health")


def _check_import_path(value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no import path such as my_package.my_module.MyMiddleware")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class HttpSettings(QueueSettings):
    """One frozen set of values per process."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for every one, which needs API keys (`pipeline keys create`).",
    )
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", min=0, max=65535)
    uds: str | None = setting(None, "Path of a Unix socket to listen on, in place of --host and --port.")
    insecure: bool = setting(
        False, "While no API key exists, answer every client that reaches the address, but no web page from elsewhere."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Public host name under which clients and web pages reach this server, besides its own; may be repeated. While"
        " no API key exists, pages of others are refused, and on a loopback address all calls under others.",
        flag="allowed-host",
    )
    ssl_keyfile: str | None = setting(None, "PEM file of the private key. [default: in --ssl-certfile]")
    ssl_certfile: str | None = setting(None, "PEM file of the server's certificate and its chain; turns TLS on.")
    ssl_ca_certs: str | None = setting(None, "PEM file of the authorities that certificates of clients come from.")
    ssl_cert_reqs: int = setting(
        0, "Certificates of clients: 0 asks for none, 1 checks one that is sent, 2 requires one.", min=0, max=2
    )
    ssl_ciphers: str | None = setting(None, "Ciphers of TLS 1.2, as OpenSSL lists them. [default: Python's choice]")
    enable_ssl_refresh: bool = setting(False, "Read certificate and key again when their files change.")
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origin of web pages that may read answers (CORS), as https://app.example.org, or *; may be repeated, or a"
        " JSON list. Without API keys * lets no page in that is not named.",
        check=_check_origin,
    )
    allowed_methods: tuple[str, ...] = setting(
        (ANY,), "Method that such pages may use; may be repeated, or a JSON list.", check=_check_token
    )
    allowed_headers: tuple[str, ...] = setting(
        (ANY,), "Request header that such pages may send; may be repeated, or a JSON list.", check=_check_token
    )
    allow_credentials: bool = setting(False, "Let such pages send cookies, for a proxy that asks for them.")
    root_path: str = setting(
        "", "Path below which a proxy in front shows this server, with or without taking it off.", check=_check_path
    )
    middleware: tuple[str, ...] = setting(
        (),
        "Import path of ASGI middleware, a class or an async function (request, call_next); may be repeated, and the"
        " last one is outermost.",
        check=_check_import_path,
    )
    max_connections: int = setting(
        10_000,
        "Connections of an API process at once; on one more, calls are answered 503. The limit of open files may be"
        " lower.",
        above=0,
    )
    h11_max_incomplete_event_size: int = setting(
        64 * 1024, "Largest head of a request, in bytes.", above=0, kind="size"
    )
    h11_max_header_count: int = setting(256, "Most headers of a request.", above=0)
    timeout_head: float = setting(20.0, "Seconds for the head of a request, or for TLS, to arrive.", above=0)
    timeout_keep_alive: int = setting(
        5, "Seconds for which an idle connection is kept; above that of a proxy in front.", above=0
    )
    disable_uvicorn_access_log: bool = setting(False, "Log no line per answered request.")
    disable_access_log_for_endpoints: str = setting(
        ",".join((*PROBED, ALIVE)), "Paths without a line in the access log, with commas.", check=_check_paths
    )
    disable_fastapi_docs: bool = setting(False, "Do not serve /openapi.json.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, listed(getattr(self, name)))
        object.__setattr__(self, "allowed_origins", tuple(map(_as_browsers_send, self.allowed_origins)))
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise SettingsError("TLS needs a certificate: give --ssl-certfile, or leave out the other --ssl flags")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise SettingsError(
                "--ssl-cert-reqs checks certificates of clients: give --ssl-ca-certs, which they are of"
            )
        if self.allow_credentials and ANY in self.allowed_origins:
            raise SettingsError(
                "--allow-credentials with --allowed-origins '*' lets every page act as its user: name the origins"
            )

    @property
    def is_local(self) -> bool:
        """Return whether the server can be reached from this machine alone."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def unlogged_paths(self) -> frozenset[str]:
        """Return the paths that are left out of the access log."""
        return frozenset(filter(None, self.disable_access_log_for_endpoints.split(",")))


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
