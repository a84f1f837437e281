"""Chooses brokers for the streamlets of a new stream. Pure: brokers and their load in, a broker per streamlet out.

The brokers with the fewest streamlets are chosen, and get the same number each, or one more, the least loaded first.
Ties go to the lower broker id, so that equal arguments always give equal results.
"""

from __future__ import annotations

from collections.abc import Mapping

from kera.core.errors import InvalidArgument, Unavailable


def place(streamlets: int, brokers: int, load: Mapping[int, int]) -> list[int]:
    """Return the broker ids of streamlets 0, 1, …; `load` has the number of streamlets of each live broker.

    `brokers` is how many to use; 0: as many as there are. Raises `InvalidArgument` if there are fewer streamlets than
    `brokers`, and `Unavailable` if there are fewer live brokers: more may come.
    """
    if brokers > streamlets:
        raise InvalidArgument(
            f"{streamlets} streamlets cannot be spread over {brokers} brokers; ask for at least as many streamlets",
            streamlets=streamlets,
            brokers=brokers,
        )
    wanted = brokers or 1
    if len(load) < wanted:
        raise Unavailable(
            f"the stream needs {wanted} live broker{'s' if wanted > 1 else ''}, there {count_in_words(len(load))};"
            " start more",
            brokers=wanted,
            live_brokers=len(load),
        )
    least_loaded_first = sorted(load, key=lambda broker_id: (load[broker_id], broker_id))
    chosen = least_loaded_first[: brokers or streamlets]
    return [chosen[streamlet_id % len(chosen)] for streamlet_id in range(streamlets)]


def count_in_words(count: int) -> str:
    """Return the verb and the number for a sentence that begins with "there"."""
    return {0: "is none", 1: "is 1"}.get(count, f"are {count}")
