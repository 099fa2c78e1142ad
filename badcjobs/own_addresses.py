"""Under which names and addresses others reach this machine: for a server that listens on all of them."""

from __future__ import annotations

import ipaddress
import socket

# Addresses that were set apart for documents (RFC 5737, RFC 3849): a route to them is the one to everybody else.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def is_wildcard(host: str) -> bool:
    """Say whether listening there means listening on every address of this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def reachable_as(*, also_ipv6: bool = False) -> list[str]:
    """Return the name of this machine, if others find it under that, then its addresses; at least one of them."""
    name = socket.getfqdn()
    by_name = _look_up(name)
    families = _ELSEWHERE if also_ipv6 else _ELSEWHERE[:1]
    addresses = [*by_name, *(found for family, where in families if (found := _address_towards(family, where)))]
    wanted = [one for one in dict.fromkeys(addresses) if also_ipv6 or ":" not in one]
    return ([name] if by_name else []) + wanted or [name]


def _look_up(name: str) -> list[str]:
    """Return the addresses that a name stands for, without those that mean another machine to everybody else."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(where[0]) for *_, where in found if _is_for_others(str(where[0]))]


def _address_towards(family: socket.AddressFamily, where: str) -> str | None:
    """Return our address on the way to another one; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where, 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return address if _is_for_others(address) else None


def _is_for_others(address: str) -> bool:
    one = ipaddress.ip_address(address.partition("%")[0])
    return not (one.is_loopback or one.is_link_local or one.is_unspecified)
