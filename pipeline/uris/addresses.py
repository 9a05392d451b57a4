"""The check that http inputs come from public or allowed addresses."""

import ipaddress
import socket
from typing import NamedTuple

from pipeline.errors import Refused, Unfinished

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: the last 32 bits are an IPv4 address."""
_COMPATIBLE = ipaddress.ip_network("::/96")
"""Deprecated IPv4-compatible addresses: the last 32 bits are an IPv4 address."""
_OF_CLOUDS = ipaddress.ip_address("168.63.129.16")
"""Azure's internal services for virtual machines; the address is formally public."""


class AllowedHosts(NamedTuple):
    """Host names and networks that are allowed in addition to public addresses."""

    names: frozenset[str] = frozenset()
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    def __str__(self) -> str:
        return ",".join([*sorted(self.names), *map(str, self.networks)])


def parse_allowed(text: str) -> AllowedHosts:
    """Read names, addresses and networks, separated by commas. Raise ValueError."""
    names, networks = set(), []
    for one in filter(None, (part.strip() for part in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(one.strip("[]")))
        except ValueError as error:
            if "/" in one or ":" in one:
                raise ValueError(f"{one!r} is neither a host nor a network such as 10.0.0.0/8: {error}") from None
            names.add(one.lower().rstrip("."))
    return AllowedHosts(frozenset(names), tuple(networks))


def checked_addresses(host: str, port: int, allowed: AllowedHosts) -> list[str]:
    """Return the checked addresses of a host; connect to these without another lookup.

    Raise `Refused` if one is not allowed, and `Unfinished` if there is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise Refused(f"{host!r} is not a host name") from None
    except OSError as error:
        raise Unfinished(f"the host {host} cannot be found: {error.strerror}") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if host.lower().rstrip(".") not in allowed.names and not _is_allowed(address, allowed):
            at = "" if address == host else f" at {address}"
            raise Refused(f"the host {host}{at} is not on the public internet: to allow it, add --allow-hosts {host}")
    return addresses


def _is_allowed(text: str, allowed: AllowedHosts) -> bool:
    address = ipaddress.ip_address(text)
    return any(address in network for network in allowed.networks) or all(map(_is_public, _reached(address)))


def _reached(address: _Address) -> list[_Address]:
    """Return an address and the IPv4 addresses embedded in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED or address in _COMPATIBLE:
        inside.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    found = [one for one in inside if one is not None]
    return found if address.ipv4_mapped else [address, *found]


def _is_public(address: _Address) -> bool:
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (address.is_multicast or is_site_local or address == _OF_CLOUDS)
