"""Options that both ends of a gRPC connection agree on."""

from __future__ import annotations

from typing import Any

from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.limits import BULK_BYTES_MAX, HEAD_BYTES_MAX
from kera.core.rpc.sockets import CALLER, SERVER, Patience

ERROR_METADATA = "kera-error-bin"
"""Trailing metadata of a failed call: a ``kera.v1.Error``."""
AUTHORIZATION, BEARER = "authorization", "Bearer "
"""Metadata of a call that carries a token, and the word before the token."""
AUTHENTICATE_METADATA = "kera-authenticate-bin"
"""Metadata of a call of ``Authenticate``: the request; the message of the call is empty. A server receives no messages
from unknown callers, as these could be of any size."""
METADATA_BYTES_MAX = 24 << 10
"""Maximum of a call's metadata that servers accept: it has room for the longest token."""
CALLS_MAX = 1 << 14
"""Calls of all clients that a server has at once; further ones are refused (``RESOURCE_EXHAUSTED``)."""
CONNECTION_CALLS_MAX_DEFAULT = 100
"""Calls of one connection that a server takes at once, bulk streams included; the client keeps further ones until
others have been answered. RFC 9113 (6.5.2) advises against less."""
CONNECTION_IDLE_MS = 60_000
"""Time without a call after which a server closes a connection; the client connects again for its next call."""
HANDSHAKE_MS = 5_000
"""Time for the handshake of HTTP/2: a peer that only connects holds a descriptor for no longer."""
UNTAKEN_BYTES_MAX = 16 << 10
"""Maximum of data received for a call before a handler reads them, at a server that authenticates callers."""
_FIELD_OVERHEAD_BYTES = 64
"""Tag and length of the bulk field, and the request id, come on top of the two limits."""


def channel_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Return explicit limits of message sizes, the same on both sides."""
    limit = HEAD_BYTES_MAX + bulk_bytes_max + _FIELD_OVERHEAD_BYTES
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def _keepalive(patience: Patience) -> list[tuple[str, Any]]:
    """Return options for the same keepalive as that of frame sockets, by gRPC's pings, also while there is no call.

    gRPC uses the time-out for TCP as well (``TCP_USER_TIMEOUT``).
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
    """Return the options of a server.

    Ports are not shared, so a taken port is an error. Calls that come in a burst wait for their turn: by default gRPC
    cancels calls at random when more than 1000 wait. It begins calls in the order in which they came, each takes some
    0.3 ms, and we cannot make it take turns. So the number of calls of one connection, for which others may have to
    wait, is bounded. gRPC's protection against overload is off: it would still count calls whose answer is being sent,
    and refuse the next call of a client that has just got this answer.

    gRPC accepts `connections_max` connections, closes further ones at once, and cannot close the idlest for a new one.
    So idle connections are closed after a while in any case, and silent ones sooner if few places are left
    (``grpc_room``). Clients may send pings twice as often as ours do.

    By default, the faster a peer sends, the more gRPC receives of calls that no handler has read yet, even of calls
    that are about to be refused: ten unauthenticated connections took 1.5 GiB. A server that `asks` who calls receives
    at most `UNTAKEN_BYTES_MAX` of each such call. A message that is being read has room by the megabyte, so messages of
    256 KiB arrive at two thirds of the rate, and larger ones as fast as before.
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
    """Return the options of a client.

    A restarted daemon is found within a second, where gRPC would wait up to two minutes by default. An attempt to
    connect that gets no answer is given up after one second, and not after 20. Each channel has a separate connection,
    as in the other transports.

    Calls go straight to the daemon: the proxies in `http_proxy` and similar variables are for the web, and do not know
    the cluster.
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
