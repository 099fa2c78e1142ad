"""The addresses under which others reach this machine, and what a server says of where it is."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from rooms.live import bind, reachable_hosts


def test_others_are_given_a_name_or_an_address_of_theirs_to_use() -> None:
    for host in reachable_hosts(also_ipv6=True):
        try:
            address = ipaddress.ip_address(host)
            assert not address.is_loopback
            assert not address.is_unspecified
        except ValueError:
            assert host == socket.getfqdn()


def test_a_server_on_all_addresses_says_one_that_can_be_opened() -> None:
    listening, place = bind("0.0.0.0", 0, "a-token-of-some-length")
    with listening:
        assert "0.0.0.0" not in place.url
        address = urlsplit(place.url)
        assert address.hostname
        assert address.port == place.port
        socket.create_connection((address.hostname, place.port), timeout=5).close()


def test_a_server_on_one_address_says_that() -> None:
    listening, place = bind("127.0.0.1", 0)
    with listening:
        assert place.urls == (f"http://127.0.0.1:{place.port}/",)
