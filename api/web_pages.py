"""Keep web pages away from a server without API keys, which answers every client that reaches it.

Any page that is open in a browser on this machine can make that browser call. A page whose name
points at this machine (DNS rebinding) has a foreign `Host`, from the page's address: a public name,
never numeric and never of a local network. `Host` is checked on a loopback address alone; on
another one the operator lets every client call. Other pages have a foreign `Origin`.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import needs_no_key
from api.http.errors import error_response
from api.http.route_path import route_path
from api.http_settings import ANY, PROBED, is_loopback
from api.settings import ApiSettings
from api.threads import KEYS, run_in
from jobs.protocol import fields
from jobs.protocol.results import ApiError
from jobs.store.api_keys import KeyRing, KeysUnreadable

_LOCAL_SUFFIXES = (".localhost", ".internal", ".local")
_WAY_OUT = "make a key (`pipeline keys create`), or start it with --allowed-host NAME"


class WebPages:
    """Refuse calls of web pages with 403 while no key is needed, as plain ASGI middleware.

    Keys are read only for a request that might be a page's.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, settings: ApiSettings) -> None:
        self._app = app
        self._keys = keys
        self._settings = settings
        names = ("localhost", socket.gethostname(), settings.host, *settings.allowed_hosts)
        self._names = {name.lower() for name in names if name}
        self._judges_host = settings.is_local
        self._origins = {origin for origin in settings.allowed_origins if origin != ANY}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        judged = scope["type"] == "http" and route_path(scope) not in PROBED
        refusal = self._refusal(Headers(scope=scope)) if judged else None
        if refusal is not None and await self._is_open():
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name_of(f"//{host}")
        if self._judges_host and host and not (self._is_own(name) or _is_local(name)):
            return _refused(f"is not called '{fields.shown(host)}'", "host_not_allowed")
        if origin is not None and not self._is_known(origin, name):
            return _refused(f"answers no web page of '{fields.shown(origin)}'", "origin_not_allowed")
        return None

    def _is_known(self, origin: str, called: str) -> bool:
        """Return whether an origin is allowed, has the name `called`, or is one of this server's
        names.
        """
        return origin in self._origins or _name_of(origin) == called or self._is_own(_name_of(origin))

    def _is_own(self, name: str) -> bool:
        return name in self._names or name.endswith(".localhost") or is_loopback(name)

    async def _is_open(self) -> bool:
        try:
            return needs_no_key(await run_in(KEYS, self._keys.look), self._settings)
        except KeysUnreadable:
            return False  # then every call is refused


def _refused(what: str, code: str) -> ApiError:
    return ApiError(403, f"This server has no API keys, and {what}: {_WAY_OUT}.", code=code)


def _name_of(url: str) -> str:
    """Return the host of an address, "" if there is none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    """Return whether no public name server can answer for the name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(_LOCAL_SUFFIXES) or (name != "" and "." not in name)
    return True
