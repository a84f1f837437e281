"""Columns with the state of all lanes of a stream: a bundle for a thousand of them takes one look, not a thousand.

Each `Lane` keeps its own place in them up to date; whole bundles go through `join`, `leave` and `stored`.
"""

from __future__ import annotations

from array import array

import numpy as np

from kera.client.producing.encoding.partitioner import Numbers

NOBODY = -1


class LaneColumns:
    """By streamlet. The arrays are for one lane at a time; bundles use the same memory as columns of numpy's."""

    def __init__(self, count: int, producer_epoch: int) -> None:
        zeros = bytes(8 * count)
        self.next_sequence = array("q", zeros)
        self.in_flight = array("q", zeros)
        """Chunks that are sent and not answered, and those in bundles."""
        self.producer_epoch = array("q", [producer_epoch]) * count
        self.epoch_used = bytearray(count)
        """Something of this epoch is stored, or may be."""
        self.busy = bytearray(count)
        """Lanes whose new chunks have to wait for earlier ones, or cannot be sent at all."""
        self._next_sequence, self._in_flight, self._producer_epoch = (
            np.frombuffer(column, np.int64) for column in (self.next_sequence, self.in_flight, self.producer_epoch)
        )
        self._epoch_used, self._busy = (np.frombuffer(column, np.bool_) for column in (self.epoch_used, self.busy))
        self._settled = np.full(count, NOBODY, np.int64)

    # -- where chunks go -------------------------------------------------------------------------------------------

    def settle(self, streamlet: int, broker_id: int) -> None:
        """All is well with a lane, and that broker has its streamlet; `NOBODY`: that is not so."""
        self._settled[streamlet] = broker_id

    def is_settled(self, streamlet: int) -> bool:
        """Whether it is known who has it."""
        return bool(self._settled[streamlet] != NOBODY)

    def unsettle(self) -> None:
        """Forget for all lanes where their chunks go."""
        self._settled.fill(NOBODY)

    def brokers(self, streamlets: Numbers) -> Numbers:
        """Where chunks of bundles go; `NOBODY`: these do not go in a bundle."""
        found = self._settled[streamlets]
        found[self._busy[streamlets]] = NOBODY
        return found

    # -- bundles ---------------------------------------------------------------------------------------------------

    def join(self, streamlets: Numbers) -> tuple[Numbers, Numbers]:
        """A chunk for each of these goes in a bundle, in flight from now on: epochs and sequences of the chunks.

        A streamlet may come several times, its chunks in their order. None of the lanes is busy.
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
        """The chunks that joined last are in no bundle after all."""
        np.subtract.at(self._next_sequence, streamlets, 1)
        np.subtract.at(self._in_flight, streamlets, 1)

    def stored(self, streamlets: Numbers) -> list[int]:
        """The chunks of a bundle are stored. Returns the streamlets whose lanes have more to do."""
        self._epoch_used[streamlets] = True
        np.subtract.at(self._in_flight, streamlets, 1)
        busy = streamlets[self._busy[streamlets]]
        return [*dict.fromkeys(busy.tolist())]
