"""The addresses under which others reach this machine, and what a server says of where it is."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from badcjobs.live.serve import Address, bind, is_wildcard, reachable_as


@pytest.mark.parametrize(("host", "wild"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("gpu1", False)])
def test_the_addresses_that_mean_all_of_them_are_known(host: str, wild: bool) -> None:
    assert is_wildcard(host) is wild


def test_others_are_given_a_name_or_an_address_of_theirs_to_use() -> None:
    for host in reachable_as(also_ipv6=True):
        assert not is_wildcard(host)
        try:
            assert not ipaddress.ip_address(host).is_loopback
        except ValueError:
            assert host == socket.getfqdn()


def test_a_server_on_all_addresses_says_one_that_can_be_opened() -> None:
    listening, place = bind(Address("0.0.0.0", 0, "a-token-of-some-length"))
    with listening:
        assert "0.0.0.0" not in place.url
        assert place.url == f"http://{place.name}:{place.port}/"
        socket.create_connection((place.name, place.port), timeout=5).close()


def test_a_server_on_one_address_says_that() -> None:
    listening, place = bind(Address("127.0.0.1", 0))
    with listening:
        assert place.urls == (f"http://127.0.0.1:{place.port}/",)
