"""gRPC over TLS: a refused client, and one that refuses, learns why, though a gRPC server does not give the reason."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import Unavailable, Uncertain
from kera.core.rpc import Call, Reply
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from tests.certificates import HOST, Issuing, Pair
from tests.unit.core.rpc.transports import (
    ECHO,
    TIMEOUT_S,
    UNARY,
    Closing,
    UnaryRequest,
    eventually,
    numbered,
    unary_echo,
)

CLOSED = "it closes the connection at once"


class Certified:
    """Both ends, with certificates of any kind."""

    def __init__(self, directory: Path, closing: Closing) -> None:
        self.authority, _ = Authority.open_or_make(directory / "authority")
        self._issuing = Issuing(self.authority, directory / "issued")
        self._closing = closing
        self.address = ""

    def tls(self, kind: str = "good", **files: Any) -> Tls:
        """TLS with a certificate of this kind; empty: without a certificate."""
        if not kind:
            return Tls(TlsFiles(ca=self.authority.path))
        pair: Pair = getattr(self._issuing, kind)()
        return Tls(TlsFiles(pair.cert, pair.key, self.authority.path, **files))

    async def serve(self, tls: Tls | None) -> None:
        server = self._closing(GrpcServer([{UNARY: unary_echo}], tls=tls))
        self.address = f"{HOST}:{await server.listen(HOST, 0)}"

    async def call(self, tls: Tls | None) -> None:
        channel = self._closing(GrpcChannel(self.address, tls=tls))
        await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)

    async def refused(self, tls: Tls | None) -> str:
        """The reason that a refused client gets."""
        with pytest.raises(Unavailable) as caught:
            await self.call(tls)
        assert caught.value.attributes == {"address": self.address, "refused": True}
        return caught.value.message.removeprefix(f"cannot connect to {self.address}: ")


@pytest.fixture
def certified(tmp_path: Path, closing: Closing) -> Certified:
    return Certified(tmp_path, closing)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("", f"{CLOSED}; if it wants a certificate, set tls_cert and tls_key"),
        ("expired", r"expired\.pem: certificate has expired"),
        ("not_yet_valid", r"not_yet_valid\.pem: certificate is not yet valid"),
        ("self_signed", r"self_signed\.pem: self-signed certificate"),
        ("of_a_stranger", r"of_a_stranger\.pem: unable to get local issuer certificate"),
        ("of_servers_only", r"of_servers_only\.pem: unsuitable certificate purpose"),
    ],
)
async def test_a_client_with_a_refused_certificate_learns_why(certified: Certified, kind: str, told: str) -> None:
    await certified.serve(certified.tls(client_auth="required"))
    text = await certified.refused(certified.tls(kind))
    assert text.startswith(CLOSED)
    assert re.search(told, text)
    await certified.call(certified.tls("good"))


async def test_a_client_with_a_seemingly_good_certificate_is_referred_to_the_log(
    certified: Certified, tmp_path: Path
) -> None:
    """The client trusts an authority that the server does not."""
    await certified.serve(certified.tls(client_auth="required"))
    stranger, _ = Authority.open_or_make(tmp_path / "stranger")
    one = stranger.issue("alice", client=True)
    both = tmp_path / "both.pem"
    both.write_bytes(stranger.path.read_bytes() + certified.authority.path.read_bytes())
    text = await certified.refused(Tls(TlsFiles(one.cert, one.key, both)))
    assert text == f"{CLOSED}, as if it did not take {one.cert}; its log says why"


NOT_TAKEN = "its certificate is not accepted: "


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("expired", f"{NOT_TAKEN}certificate has expired"),
        ("not_yet_valid", f"{NOT_TAKEN}certificate is not yet valid"),
        ("self_signed", f"{NOT_TAKEN}self signed certificate; is its authority in tls_ca?"),
        ("of_a_stranger", f"{NOT_TAKEN}unable to get local issuer certificate; is its authority in tls_ca?"),
        ("for_another_host", f"{NOT_TAKEN}it is for another host"),
        ("without_hosts", f"{NOT_TAKEN}it is for another host"),
        ("of_clients_only", f"{NOT_TAKEN}unsupported certificate purpose"),
    ],
)
async def test_a_client_that_refuses_the_servers_certificate_gives_the_reason(
    certified: Certified, kind: str, told: str
) -> None:
    await certified.serve(certified.tls(kind))
    assert await certified.refused(certified.tls("")) == told


async def test_the_error_names_the_end_that_lacks_tls(certified: Certified) -> None:
    await certified.serve(certified.tls())
    assert await certified.refused(None) == f"{CLOSED}; if it speaks TLS, set tls_ca"
    await certified.serve(None)
    assert await certified.refused(certified.tls()) == "it does not speak TLS"


async def test_the_error_names_a_port_that_is_not_of_grpc(certified: Certified, closing: Closing) -> None:
    frames = closing(FrameServer({UNARY: unary_echo}, tls=certified.tls()))
    certified.address = f"{HOST}:{await frames.listen_tcp(HOST, 0)}"
    text = "it speaks TLS and not gRPC: that is another port, of frames or metrics"
    assert await certified.refused(certified.tls()) == text


class Changing(Tls):
    """Certificates whose version a test changes; counts the connections opened with them."""

    def __init__(self, files: TlsFiles) -> None:
        super().__init__(files)
        self.changes = 0
        self.opened = 0

    @property
    def version(self) -> bytes:
        return bytes([self.changes])

    def channel_credentials(self) -> Any:
        self.opened += 1
        return super().channel_credentials()


async def test_a_closed_channel_opens_no_connection_when_certificates_have_changed(certified: Certified) -> None:
    tls = Changing(certified.tls("").files)
    channel = GrpcChannel(f"{HOST}:1", tls=tls)
    await channel.close()
    tls.changes += 1
    with pytest.raises(Unavailable, match="is closed"):
        await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    assert tls.opened == 1


async def test_requests_of_a_replaced_connection_end_when_the_channel_closes(
    certified: Certified, closing: Closing
) -> None:
    asked: list[Any] = []

    async def never(call: Call[Any]) -> Reply[Any]:
        asked.append(call.message)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    server = closing(GrpcServer([{UNARY: never, ECHO: never}], tls=certified.tls()))
    tls = Changing(certified.tls("").files)
    channel = GrpcChannel(f"{HOST}:{await server.listen(HOST, 0)}", tls=tls)
    under_way: list[Any] = [
        channel.submit(UNARY, UnaryRequest(), timeout_s=1000),
        channel.submit(ECHO, numbered(1), timeout_s=1000),
    ]
    await eventually(lambda: len(asked) == 2)
    tls.changes += 1
    under_way.append(channel.submit(ECHO, numbered(2), timeout_s=1000))
    await eventually(lambda: len(asked) == 3)
    async with asyncio.timeout(TIMEOUT_S):
        await channel.close()
    for each in under_way:
        with pytest.raises(Uncertain, match="closed"):
            await each
    assert tls.opened == 2
