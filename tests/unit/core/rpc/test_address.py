"""host:port, both ways."""

import pytest

from kera.core.errors import InvalidArgument
from kera.core.rpc.address import join_address, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        ("broker-1.example.org:1", "broker-1.example.org", 1),
        ("[::1]:65535", "::1", 65535),
        ("localhost:0", "localhost", 0),
    ],
)
def test_an_address_is_host_and_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":7400", "localhost:http", "localhost:-1", "h:65536", "::1:7400", "h:²"]
)
def test_what_is_no_address_is_refused_and_named(address: str) -> None:
    with pytest.raises(InvalidArgument, match="no address of the form host:port") as caught:
        split_address(address)

    assert caught.value.attributes == {"address": address}
