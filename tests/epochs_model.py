"""What an entry and its broker do for epochs, and nothing else: what readers and brokers are held against."""

from __future__ import annotations

LONG_AGO = -(10**9)
Chunk = tuple[str, int, int]
"""Kind, greatest time, and a number that no other chunk has."""


class Owner:
    """An entry and its broker: what `Streamlet.promise`, `keep_promise` and `punctuate` do."""

    def __init__(self, grace: int, *, punctuates: bool = True) -> None:
        self.grace = grace
        self.log: list[Chunk] = []
        self.promised = 0
        self.punctuates = punctuates

    @property
    def watermark(self) -> int:
        return max((time for _, time, _ in self.log), default=LONG_AGO)

    def promise(self, now: int) -> tuple[int, int]:
        """What it promises, and from which place on."""
        promised = now - self.grace
        if promised > self.promised and promised > self.watermark:
            self.promised = promised
        return max(promised, self.promised), len(self.log)

    def append(self, time: int, number: int) -> None:
        if time < self.promised and self.watermark < self.promised and self.punctuates:
            self.log.append(("punctuation", self.promised, -1))
        self.log.append(("chunk", time, number))

    def say(self, time: int) -> None:
        """A producer says that nothing older comes."""
        told = max(time, self.promised)
        if self.log and self.watermark < told:
            self.log.append(("punctuation", told, -1))

    def begin(self, now: int) -> None:
        """Another owner, or another launch, of whom nobody knows what the one before has promised."""
        self.promised = max(0, now)

    def hand_over(self) -> None:
        """A move: the new owner knows only what was promised and is not in the log."""
