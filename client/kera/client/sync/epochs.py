"""Epochs for those who write no asyncio: iterate over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from kera.client.epochs.epoch import Epoch
from kera.client.epochs.reader import Epochs as AsyncEpochs
from kera.client.sync.loop_thread import LoopThread
from kera.core.ids import EntryId, Position


class Epochs(Iterator[Epoch]):
    """The epochs of some streams. Made by `Client.epochs`; see `kera.client.Epochs`."""

    def __init__(self, thread: LoopThread, epochs: AsyncEpochs) -> None:
        self._thread = thread
        self._epochs = epochs

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Look up the streams, and decide where to start. Raises `UnknownStream`, and `InvalidArgument`."""
        self._thread.run(self._epochs.start())

    def __next__(self) -> Epoch:
        """The next epoch with records in it, when it is closed; raises what the asynchronous one does."""
        epoch = self._thread.run(self._next())
        if epoch is None:
            raise StopIteration
        return epoch

    async def _next(self) -> Epoch | None:
        return await anext(self._epochs, None)

    @property
    def epoch_ms(self) -> int:
        """How long an epoch is; 0: it has not started."""
        return self._epochs.epoch_ms

    def held_up_by(self) -> list[EntryId]:
        """The entries without which the next epoch cannot be closed, as far as is known."""
        return self._thread.run(self._held_up_by())

    async def _held_up_by(self) -> list[EntryId]:
        return self._epochs.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Where the first epoch that was not given out begins, per streamlet and entry."""
        return self._thread.run(self._positions(stream))

    async def _positions(self, stream: str | None) -> dict[int, list[Position]]:
        return self._epochs.positions(stream)

    def commit(self) -> None:
        """Say that all epochs that were given out have been processed; raises what the asynchronous one does."""
        self._thread.run(self._epochs.commit())

    def close(self) -> None:
        """Stop fetching. Epochs that were given out stay as they are."""
        self._thread.run(self._epochs.close())
