"""Frames over TLS: a refused client and the log get the reason; a connection frees its memory at its end."""

import asyncio
import gc
import ssl
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.core.errors import Unavailable, Uncertain
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.outbox import ENCRYPTED_BYTES_MAX
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from tests.certificates import HOST, Issuing, Pair
from tests.unit.core.rpc.transports import (
    ECHO,
    TIMEOUT_S,
    UNARY,
    Closing,
    EchoRequest,
    UnaryRequest,
    echo,
    eventually,
    settled,
    unary_echo,
)

REFUSED = [
    ("", "it asks for a certificate: set tls_cert and tls_key", "it shows no certificate"),
    ("expired", "it does not take this certificate, which has expired", "certificate has expired"),
    ("not_yet_valid", "it does not take this certificate: it is damaged, or not yet valid", "not yet valid"),
    ("self_signed", "it is of an authority that it does not know", "self-signed certificate"),
    ("of_a_stranger", "it is of an authority that it does not know", "unable to get local issuer certificate"),
    ("of_servers_only", "which is not issued for this purpose", "unsuitable certificate purpose"),
]


class Secured:
    """A server that asks for certificates, and its clients."""

    def __init__(self, directory: Path) -> None:
        self.authority, _ = Authority.open_or_make(directory / "authority")
        self.issuing = Issuing(self.authority, directory / "issued")
        host = self.authority.issue(HOST)
        self.server = FrameServer(
            {ECHO: echo, UNARY: unary_echo}, tls=Tls(TlsFiles(host.cert, host.key, self.authority.path, "required"))
        )
        self.address = ""

    def tls(self, kind: str = "good") -> Tls:
        """TLS of a client with a certificate of this kind; empty: without a certificate."""
        if not kind:
            return Tls(TlsFiles(ca=self.authority.path))
        pair: Pair = getattr(self.issuing, kind)()
        return Tls(TlsFiles(pair.cert, pair.key, self.authority.path))

    async def connect(self, tls: Tls | None) -> FrameChannel:
        return await FrameChannel.connect_tcp(self.address, timeout_s=TIMEOUT_S, tls=tls)

    async def call(self, tls: Tls | None) -> None:
        channel = await self.connect(tls)
        try:
            await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
        finally:
            await channel.close()


@pytest.fixture
async def secured(tmp_path: Path, closing: Closing) -> Secured:
    secured = Secured(tmp_path)
    secured.address = f"{HOST}:{await closing(secured.server).listen_tcp(HOST, 0)}"
    return secured


@pytest.mark.parametrize(("kind", "told", "logged"), REFUSED, ids=[kind or "none" for kind, *_ in REFUSED])
async def test_a_client_with_a_refused_certificate_learns_why(
    secured: Secured, kind: str, told: str, logged: str
) -> None:
    with capture_logs() as lines:
        with pytest.raises(Unavailable, match=f"cannot connect to {secured.address}: .*{told}"):
            await secured.call(secured.tls(kind))
        await eventually(lambda: refusals(lines))
    assert logged in refusals(lines)[0]
    await secured.call(secured.tls())


def refusals(lines: MutableSequence[Any]) -> list[str]:
    """The reasons of refused connections in the log."""
    return [line["reason"] for line in list(lines) if line["event"] == "connection refused"]


async def test_a_client_of_tls_1_2_learns_the_reason_while_it_connects(secured: Secured) -> None:
    for kind, told in ("expired", "which has expired"), ("", "or wants a certificate: see tls_cert and tls_key"):
        tls = secured.tls(kind)
        tls.client_context().maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(Unavailable, match=told):
            await secured.connect(tls)


async def test_a_client_without_tls_gets_a_hint_at_tls(secured: Secured) -> None:
    with capture_logs() as lines:
        with pytest.raises(Uncertain, match="it closes the connection at once; if it speaks TLS, set tls_ca"):
            await secured.call(None)
        await eventually(lambda: refusals(lines))
    assert refusals(lines) == ["it does not speak TLS"]


async def test_the_error_names_a_server_without_tls(secured: Secured, closing: Closing) -> None:
    plain = closing(FrameServer({UNARY: unary_echo}))
    secured.address = f"{HOST}:{await plain.listen_tcp(HOST, 0)}"
    with pytest.raises(Unavailable, match="it does not speak TLS"):
        await secured.connect(secured.tls())


async def test_a_client_that_sends_much_before_the_refusal_learns_why(secured: Secured) -> None:
    """Unread bytes at the server's close would make the kernel drop the reason."""
    channel = await secured.connect(secured.tls("expired"))
    bulk = bytes(1 << 20)
    answers = [channel.submit(ECHO, EchoRequest(), [bulk], timeout_s=TIMEOUT_S) for _ in range(4)]
    for each in await asyncio.gather(*answers, return_exceptions=True):
        assert isinstance(each, Unavailable)
        assert "which has expired" in each.message


async def test_untaken_replies_are_copied_only_in_small_part(secured: Secured) -> None:
    channel = await secured.connect(secured.tls())
    channel.hold_frames()
    bulk = bytes(24 << 20)  # the ends of a socket hold some of these bytes
    answers = [channel.submit(ECHO, EchoRequest(), [bulk], timeout_s=TIMEOUT_S) for _ in range(2)]
    await settled(lambda: secured.server.unsent_bytes)
    (connection,) = secured.server._shared.connections
    assert connection.outbox.unsent_bytes > 1 << 20
    assert connection.outbox.given_bytes <= 3 * ENCRYPTED_BYTES_MAX
    channel.release_frames()
    for each in await asyncio.gather(*answers):
        assert b"".join(each.bulk) == bulk


async def test_a_connection_frees_its_memory_at_its_end(secured: Secured) -> None:
    """The garbage collector of a daemon may find it only hours later."""
    tls = secured.tls()
    await secured.call(tls)
    gc.collect()
    gc.disable()
    try:
        before = connections_over_tls()
        for _ in range(10):
            await secured.call(tls)
        await eventually(lambda: not secured.server.connections and connections_over_tls() <= before)
    finally:
        gc.enable()


def connections_over_tls() -> int:
    """The number of TLS connections in memory."""
    return sum(isinstance(each, ssl.SSLObject) for each in gc.get_objects())
