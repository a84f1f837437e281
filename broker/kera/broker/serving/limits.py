"""Limits of a request, an answer and a connection: they bound memory, and the time for which other requests wait."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMER_GROUP_BYTES_MAX = 256
"""Maximum of a consumer group's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """The defaults are the product's; tests choose small ones."""

    # Writes.
    room_bytes_max: int = 64 << 20
    """Maximum of requests that wait for room in memory, all together."""
    room_wait_ms: int = 5_000
    """How long such a request waits, at most."""

    # Reads, and searches in the log.
    load_wait_ms: int = 5_000
    """How long a reader waits for the disk, and for memory to load into."""
    queries_max: int = 1024
    """Maximum number of queries in one request."""
    loads_max: int = 256
    """Maximum number of segments loaded for one request; the client repeats queries that need more."""
    walk_segments: int = 16384
    """Approximate number of segments that a request may walk through; a query that has to go further is answered with
    how far it got."""
    walk_segments_min: int = 64
    """Segments that each query may walk through, however many queries the request has."""
    turn_segments: int = 32
    """Segments that a request walks through before it lets other requests have their turn."""
    list_segments_max: int = 256
    """Maximum number of segments in one answer."""

    # Read sessions. A range takes about half a kilobyte of memory.
    session_ranges_max: int = 65536
    connection_ranges_max: int = 131_072
    ranges_max: int = 262_144
    """Maximum over all sessions that are kept."""
    sessions_max: int = 4096
    """Maximum for a connection: a reader has one session for each stream."""
    results_max: int = 4096
    """Maximum number of results in one answer: when a stream is dropped, each of its ranges returns an error."""
    forgotten_at_once: int = 32
    """Ranges of ended sessions that are removed before other requests have their turn."""
    woken_at_once: int = 1024
    """Ranges that follow the same entry and are woken at once; further ones are woken in slices."""

    # Descriptions and cursors.
    described_entries_max: int = 32768
    """Maximum number of entries in one answer, at most 128 bytes each: the answer has to fit into a message."""
    consumer_groups_max: int = 1024
    """Consumer groups whose cursors an entry remembers."""
    removal_s_max: float = 5.0
    """Maximum time of a truncate request: for replicated streams, the broker notifies the coordinator before it removes
    anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """Limits of one reader on the push channel, and of the time for which other connections wait.

    As above, the defaults are the product's.
    """

    subscriptions_max: int = 65536
    """Maximum for a connection. A reader that asks for more subscriptions has to pull their data."""
    run_bytes_max: int = 4 << 20
    """Maximum length of a run: a longer one would delay the other subscriptions. A single chunk may be larger."""
    flush_runs_max: int = 1024
    """Maximum number of runs in one message; after it, other connections have their turn."""
    flush_subscriptions_max: int = 64
    """Maximum number of subscriptions that are considered for one message, for the same reason."""
    steps_at_once: int = 128
    """Subscriptions begun or ended, or leases released, before other connections have their turn."""
    loads_at_once: int = 4
    """Subscriptions that wait for the disk at the same time. Loads for more would evict each other."""
