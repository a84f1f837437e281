"""Addresses as host:port: how they are split and joined."""

import re

import pytest

from kera.core.base.address import (
    advertised_address,
    host_of,
    is_everywhere,
    join_address,
    split_address,
)
from kera.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        ("broker-1.example.org:1", "broker-1.example.org", 1),
        ("[::1]:65535", "::1", 65535),
        ("localhost:0", "localhost", 0),
    ],
)
def test_an_address_is_split_into_host_and_port_and_joined_again(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":7400", "localhost:http", "localhost:-1", "h:65536", "::1:7400", "h:²"]
)
def test_an_invalid_address_is_refused_and_named(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"not an address \(host:port\)") as caught:
        split_address(address)

    assert caught.value.attributes == {"address": address}


@pytest.mark.parametrize(
    ("address", "way_out"),
    [
        ("http://localhost:7400", "without 'http://': 'localhost:7400'"),
        ("kera://localhost:7400/", "without 'kera://': 'localhost:7400'"),
        ("grpc://[::1]:7400", "without 'grpc://'"),
        ("localhost", "it has no port, as in 'localhost:7400'"),
        ("::1:7400", "an IPv6 host goes in brackets"),
        ("localhost :7400", "it has spaces"),
        ("localhost:7400 other:7400", "it has spaces"),
        ("localhost:7400/db", "nothing follows the port"),
        ("user@localhost:7400", "no user"),
        ("h:65536", "a port is a number from 0 to 65535"),
    ],
)
def test_the_error_about_an_address_says_how_to_correct_it(address: str, way_out: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(way_out)):
        split_address(address)


@pytest.mark.parametrize(
    ("advertised", "told"),
    [
        ("", "10.0.0.1:7401"),
        ("broker-1.example.org", "broker-1.example.org:7401"),
        ("broker-1.example.org:17401", "broker-1.example.org:17401"),
        ("192.0.2.7", "192.0.2.7:7401"),
        ("2001:db8::1", "[2001:db8::1]:7401"),
        ("[2001:db8::1]:9", "[2001:db8::1]:9"),
    ],
)
def test_the_advertised_address_defaults_to_where_the_daemon_listens(advertised: str, told: str) -> None:
    assert advertised_address(advertised, "10.0.0.1", 7401) == told
    assert host_of(advertised) == (split_address(told)[0] if advertised else "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_host_is_not_advertised(host: str) -> None:
    assert is_everywhere(host)
    with pytest.raises(InvalidArgument, match=r"advertised_address|not an address"):
        advertised_address("", host, 7401)
    assert advertised_address("there", host, 7401) == "there:7401"


@pytest.mark.parametrize("advertised", ["0.0.0.0", "0.0.0.0:7401", "[::]:7401", "there:0", "there:http"])
def test_an_unusable_advertised_address_is_refused(advertised: str) -> None:
    with pytest.raises(InvalidArgument):
        advertised_address(advertised, "10.0.0.1", 7401)
