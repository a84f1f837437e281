"""Columns with the state of all lanes of a stream: a bundle for a thousand lanes takes one look-up, not a thousand.

Each `Lane` keeps its own place in the columns up to date; whole bundles go through `join`, `leave` and `stored`.
"""

from __future__ import annotations

from array import array

import numpy as np

from kera.client.producing.encoding.partitioner import Numbers

NOBODY = -1


class LaneColumns:
    """The state of lanes, indexed by streamlet. A lane uses the arrays; bundles use the same memory through numpy."""

    def __init__(self, count: int, producer_epoch: int) -> None:
        zeros = bytes(8 * count)
        self.next_sequence = array("q", zeros)
        self.in_flight = array("q", zeros)
        """Chunks that are sent and not answered, and those in bundles."""
        self.producer_epoch = array("q", [producer_epoch]) * count
        self.epoch_used = bytearray(count)
        """Whether a chunk of this epoch is stored, or may be."""
        self.busy = bytearray(count)
        """Lanes whose new chunks have to wait for earlier ones, or cannot be sent at all."""
        self._next_sequence, self._in_flight, self._producer_epoch = (
            np.frombuffer(column, np.int64) for column in (self.next_sequence, self.in_flight, self.producer_epoch)
        )
        self._epoch_used, self._busy = (np.frombuffer(column, np.bool_) for column in (self.epoch_used, self.busy))
        self._settled = np.full(count, NOBODY, np.int64)

    # -- where chunks go -------------------------------------------------------------------------------------------

    def settle(self, streamlet: int, broker_id: int) -> None:
        """Note that a broker serves the streamlet, and the lane has no trouble; `NOBODY`: that is not known."""
        self._settled[streamlet] = broker_id

    def is_settled(self, streamlet: int) -> bool:
        """Return whether it is known which broker serves the streamlet."""
        return bool(self._settled[streamlet] != NOBODY)

    def unsettle(self) -> None:
        """Forget for all lanes which broker serves them."""
        self._settled.fill(NOBODY)

    def brokers(self, streamlets: Numbers) -> Numbers:
        """Return the brokers for chunks of bundles; `NOBODY`: the chunk cannot go in a bundle."""
        found = self._settled[streamlets]
        found[self._busy[streamlets]] = NOBODY
        return found

    # -- bundles ---------------------------------------------------------------------------------------------------

    def join(self, streamlets: Numbers) -> tuple[Numbers, Numbers]:
        """Count a chunk for each streamlet as in flight, in a bundle. Returns the epochs and sequences of the chunks.

        A streamlet may occur several times, its chunks in order. None of the lanes may be busy.
        """
        sequences = self._next_sequence[streamlets]
        ordered = np.argsort(streamlets, kind="stable")
        sorted_ = streamlets[ordered]
        first = np.concatenate(([True], sorted_[1:] != sorted_[:-1]))
        if not first.all():
            places = np.arange(len(streamlets))
            sequences[ordered] += places - np.maximum.accumulate(np.where(first, places, 0))
        np.add.at(self._next_sequence, streamlets, 1)
        np.add.at(self._in_flight, streamlets, 1)
        return self._producer_epoch[streamlets], sequences

    def leave(self, streamlets: Numbers) -> None:
        """Undo the last `join` of these streamlets."""
        np.subtract.at(self._next_sequence, streamlets, 1)
        np.subtract.at(self._in_flight, streamlets, 1)

    def stored(self, streamlets: Numbers) -> list[int]:
        """Note that the chunks of a bundle are stored. Returns the streamlets whose lanes are busy."""
        self._epoch_used[streamlets] = True
        np.subtract.at(self._in_flight, streamlets, 1)
        busy = streamlets[self._busy[streamlets]]
        return [*dict.fromkeys(busy.tolist())]
