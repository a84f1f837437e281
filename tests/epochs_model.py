"""A model of an entry and its broker that covers only epochs; tests compare readers and brokers with the model."""

from __future__ import annotations

LONG_AGO = -(10**9)
Chunk = tuple[str, int, int]
"""Kind, greatest time, and a unique number."""


class Owner:
    """An entry and its broker: the effects of `Streamlet.promise`, `keep_promise` and `punctuate`."""

    def __init__(self, grace: int, *, punctuates: bool = True) -> None:
        self.grace = grace
        self.log: list[Chunk] = []
        self.promised = 0
        self.punctuates = punctuates

    @property
    def watermark(self) -> int:
        return max((time for _, time, _ in self.log), default=LONG_AGO)

    def promise(self, now: int) -> tuple[int, int]:
        """The promised time, and the place in the log where the promise starts."""
        promised = now - self.grace
        if promised > self.promised and promised > self.watermark:
            self.promised = promised
        return max(promised, self.promised), len(self.log)

    def append(self, time: int, number: int) -> None:
        if time < self.promised and self.watermark < self.promised and self.punctuates:
            self.log.append(("punctuation", self.promised, -1))
        self.log.append(("chunk", time, number))

    def say(self, time: int) -> None:
        """A producer announces that it sends nothing older."""
        told = max(time, self.promised)
        if self.log and self.watermark < told:
            self.log.append(("punctuation", told, -1))

    def begin(self, now: int) -> None:
        """Another owner, or another launch, begins without knowing the previous promises."""
        self.promised = max(0, now)

    def hand_over(self) -> None:
        """A move: the new owner knows only the promise that is not in the log."""
