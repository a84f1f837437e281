"""Limits of a request, an answer and a connection: bounds on memory, and on the time for which others wait."""

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
    """How long one of them waits."""

    # Reads, and searches in the log.
    load_wait_ms: int = 5_000
    """How long a reader waits for the disk, and for room in memory to load to."""
    queries_max: int = 1024
    """In one request."""
    loads_max: int = 256
    """For one request; queries that need more are to be asked again."""
    walk_segments: int = 16384
    """A request may walk through about so many; queries that have to go further are answered with how far they got."""
    walk_segments_min: int = 64
    """Segments that each query may walk through, however many queries there are."""
    turn_segments: int = 32
    """After so many it is looked whether others have their turn."""
    list_segments_max: int = 256
    """Listed in one answer."""

    # Read sessions. A range takes about half a kilobyte of memory.
    session_ranges_max: int = 65536
    connection_ranges_max: int = 131_072
    ranges_max: int = 262_144
    """Maximum over all sessions that are kept."""
    sessions_max: int = 4096
    """Maximum of a connection: a reader has one for each stream."""
    results_max: int = 4096
    """In one answer: when a stream is dropped, each of its ranges has an error to tell."""
    forgotten_at_once: int = 32
    """Ranges of sessions that have ended; then it is looked whether others have their turn."""
    woken_at_once: int = 1024
    """Ranges that follow the same entry; more than that are woken in slices."""

    # Descriptions and cursors.
    described_entries_max: int = 32768
    """In one answer, in at most 128 bytes each: it has to fit into a message."""
    consumer_groups_max: int = 1024
    """Consumer groups whose cursors an entry remembers."""
    removal_s_max: float = 5.0
    """Maximum time of a request to truncate: for replicated streams the coordinator is notified before anything is
    removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """Limits of one reader that is pushed to, and of the time for which others wait; likewise."""

    subscriptions_max: int = 65536
    """Maximum of a connection. Further subscriptions are answered that they have to pull."""
    run_bytes_max: int = 4 << 20
    """A longer run would keep the other subscriptions waiting; a single chunk may be larger."""
    flush_runs_max: int = 1024
    """In one message; then it is other connections' turn."""
    flush_subscriptions_max: int = 64
    """Looked at for one message, likewise."""
    steps_at_once: int = 128
    """Subscriptions that are begun or ended, or leases; then it is looked whether others have their turn."""
    loads_at_once: int = 4
    """Subscriptions that wait for the disk. What is loaded for more of them would only push each other out."""
