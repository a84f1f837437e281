"""Options that both ends of a gRPC connection agree on."""

from __future__ import annotations

from typing import Any

from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.limits import BULK_BYTES_MAX, HEAD_BYTES_MAX
from kera.core.rpc.sockets import CALLER, SERVER, Patience

ERROR_METADATA = "kera-error-bin"
"""Trailing metadata of a failed call: a ``kera.v1.Error``."""
AUTHORIZATION, BEARER = "authorization", "Bearer "
"""Metadata of a call: who shows a token shows it here, behind this word."""
AUTHENTICATE_METADATA = "kera-authenticate-bin"
"""Likewise, of a call of ``Authenticate``: the request, whose message is empty. Of who is not known yet a server takes
no messages, which could be of any size."""
METADATA_BYTES_MAX = 24 << 10
"""Maximum of a call that servers accept: room for the longest token."""
CALLS_MAX = 1 << 14
"""Calls of all clients that a server has at once; further ones are refused (``RESOURCE_EXHAUSTED``)."""
CONNECTION_CALLS_MAX_DEFAULT = 100
"""Calls of one connection that a server takes at once, and streams of bulk among them; its client keeps further ones
until others have been answered. RFC 9113 (6.5.2) advises against less."""
CONNECTION_IDLE_MS = 60_000
"""Without a call; then the server takes its leave, and the client connects again when it has one."""
HANDSHAKE_MS = 5_000
"""For the first words of HTTP/2. Who only connects holds a descriptor for no longer."""
UNTAKEN_BYTES_MAX = 16 << 10
"""Maximum of each call that no handler has taken yet, at a server that authenticates callers."""
_FIELD_OVERHEAD_BYTES = 64
"""Tag and length of the bulk field, and the request id, come on top of the two limits."""


def channel_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Explicit message-size limits, the same on both sides."""
    limit = HEAD_BYTES_MAX + bulk_bytes_max + _FIELD_OVERHEAD_BYTES
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def _keepalive(patience: Patience) -> list[tuple[str, Any]]:
    """The keepalive of sockets of frames, in gRPC's way: its own pings, also while there is no call.

    The time-out is that of TCP as well (``TCP_USER_TIMEOUT``), which gRPC sets by itself.
    """
    return [
        ("grpc.keepalive_time_ms", 1000 * patience.idle_s),
        ("grpc.keepalive_timeout_ms", patience.silent_ms - 1000 * patience.idle_s),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(
    bulk_bytes_max: int = BULK_BYTES_MAX,
    connections_max: int = CONNECTIONS_MAX_DEFAULT,
    connection_calls_max: int = CONNECTION_CALLS_MAX_DEFAULT,
    handshake_ms: int = HANDSHAKE_MS,
    *,
    asks: bool = False,
) -> list[tuple[str, Any]]:
    """Ports are not shared, so a taken one is an error; and calls that came in a burst wait for their turn.

    By itself gRPC cancels calls at random when more than 1000 are waiting. It begins calls in the order in which they
    came, each takes some 0.3 ms, and nothing of ours can tell it to take turns: so how many of one connection others
    may find before them is bounded. Its protection against overload would still count calls whose answer is on its way,
    and refuse what a client sends as soon as it has that answer.

    It takes so many connections and closes others at once. It cannot close the idlest for a new one, so idle ones are
    closed after a while in any case, and those that say nothing sooner where places are few (``grpc_room``). Pings of
    clients are answered as often as ours send them, and twice as often.

    By itself gRPC receives more of calls that nobody has taken yet, the faster a peer sends, also of those that are
    about to be refused: ten connections of strangers had 1.5 GiB. A server that `asks` who calls keeps to
    `UNTAKEN_BYTES_MAX` of each call. For a message that is taken there is room by the megabyte: so those of 256 KiB
    come at two thirds of the rate, and larger ones as fast.
    """
    windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", UNTAKEN_BYTES_MAX)] if asks else []
    return [
        *channel_options(bulk_bytes_max),
        *_keepalive(SERVER),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * CALLER.idle_s // 2),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", connection_calls_max),
        *windows,
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.http.overload_protection", 0),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", CALLS_MAX),
    ]


def client_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """A daemon that is back is found within a second; by itself gRPC would wait up to two minutes.

    And an attempt to connect that the network swallows is given up after one, and not after 20. Each channel has a
    connection of its own, as in the other transports.

    Calls go straight to the daemon: the proxies that `http_proxy` and its like name are for the web, and know nothing
    of the cluster.
    """
    return [
        *channel_options(bulk_bytes_max),
        *_keepalive(CALLER),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
