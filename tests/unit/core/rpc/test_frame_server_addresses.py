"""Addresses of a frame server: ports and unix sockets that are taken, stale, or of others."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from kera.core.errors import PathNotWritable, PortTaken
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from tests.unit.core.rpc.transports import HOST, TIMEOUT_S, UNARY, Closing, UnaryRequest, unary_echo


async def test_the_error_names_a_port_in_use(closing: Closing) -> None:
    server, other = closing(FrameServer({})), closing(FrameServer({}))
    port = await server.listen_tcp(HOST, 0)

    with pytest.raises(PortTaken) as caught:
        await other.listen_tcp(HOST, port)

    assert caught.value.message == (
        f"frames: cannot listen on {HOST}:{port}: Address already in use; choose another port"
    )
    assert caught.value.attributes == {"host": HOST, "port": port}


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_the_error_names_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(PortTaken, match=f"frames: cannot listen on {host}:0: "):
        await FrameServer({}).listen_tcp(host, 0)


async def test_a_port_is_free_again_when_the_server_is_closed(closing: Closing) -> None:
    server = closing(FrameServer({UNARY: unary_echo}))
    port = await server.listen_tcp(HOST, 0)
    channel = closing(await FrameChannel.connect_tcp(f"{HOST}:{port}", timeout_s=TIMEOUT_S))
    await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    await server.close()

    again = closing(FrameServer({}))
    assert await again.listen_tcp(HOST, port) == port


async def test_one_server_listens_on_several_addresses(closing: Closing, short_path: Path) -> None:
    server = closing(FrameServer({UNARY: unary_echo}))
    port = await server.listen_tcp(HOST, 0)
    await server.listen_unix(short_path / "socket")

    tcp = closing(await FrameChannel.connect_tcp(f"{HOST}:{port}", timeout_s=TIMEOUT_S))
    unix = closing(await FrameChannel.connect_unix(str(short_path / "socket"), timeout_s=TIMEOUT_S))

    for channel in (tcp, unix):
        reply = await channel.submit(UNARY, UnaryRequest(name=channel.transport), timeout_s=TIMEOUT_S)
        assert reply.message.cluster_id == channel.transport


async def test_a_unix_socket_is_for_its_owner_alone_and_removed_at_close(closing: Closing, short_path: Path) -> None:
    path = short_path / "socket"
    server = closing(FrameServer({}))

    await server.listen_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.close()

    assert not path.exists()


async def test_a_unix_socket_in_use_is_not_taken_over(closing: Closing, short_path: Path) -> None:
    path = short_path / "socket"
    server, other = closing(FrameServer({UNARY: unary_echo})), closing(FrameServer({}))
    await server.listen_unix(path)

    with pytest.raises(PortTaken, match=f"another process listens on unix socket {path}"):
        await other.listen_unix(path)

    await other.close()
    channel = closing(await FrameChannel.connect_unix(str(path), timeout_s=TIMEOUT_S))
    reply = await channel.submit(UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)
    assert reply.message.cluster_id == "a"


async def test_a_unix_socket_of_a_killed_process_is_replaced(closing: Closing, short_path: Path) -> None:
    path = short_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    server = closing(FrameServer({}))

    await server.listen_unix(path)

    closing(await FrameChannel.connect_unix(str(path), timeout_s=TIMEOUT_S))


async def test_a_file_that_is_not_a_socket_is_refused_and_kept(short_path: Path) -> None:
    path = short_path / "data"
    path.write_text("dear to somebody")

    with pytest.raises(PathNotWritable, match="a file of another kind"):
        await FrameServer({}).listen_unix(path)

    assert path.read_text() == "dear to somebody"


@pytest.mark.parametrize(
    ("name", "text"), [("missing/socket", os.strerror(errno.ENOENT)), ("x" * 108, "path too long")]
)
async def test_the_error_names_an_unusable_unix_path(short_path: Path, name: str, text: str) -> None:
    path = short_path / name

    with pytest.raises(PathNotWritable, match=text) as caught:
        await FrameServer({}).listen_unix(path)

    assert caught.value.attributes == {"path": str(path)}
