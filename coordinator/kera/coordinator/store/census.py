"""The census of the records: how many there are below each first component of their keys, and a sum over them.

A store returns what is in it. In ZooKeeper, somebody can delete or change a record, and whoever reads the rest would
take it for all there is: a stream would never have been. So each write also writes the census of what it changes, in
the same transaction, and a coordinator compares before it goes by what it has read.

    census/<first component>   JSON: records, sum (of the CRC-32C of key and value of each, modulo 2^32)
    census/.                   of the records whose key has one component
    census/.since              epoch of the first term for which it holds

A census that is not there is taken anew: that of metadata from before there were any, and of those that were put back.
So to delete it is the way to go on with what is left. The record of the leader does not count: each term writes it.

During an upgrade, a coordinator of an earlier version may lead in between, and writes records without counting them.
Its record of the leader does not have ``census_since``, so the next term has a later one than ``census/.since``, and
takes the whole census anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kera.coordinator.store.leadership import LEADER, census_since
from kera.coordinator.store.metadata import MetadataDamaged
from kera.core.format.checksum import crc32c

CENSUS = "census/"
SINCE = CENSUS + ".since"
_TOP = "."
_SUMS = 1 << 32


class Census:
    """See the head of this module. Pure."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._counts: dict[str, int] = {}
        """By the key of the census' record."""
        self._sums: dict[str, int] = {}
        """Likewise."""
        self._checksums: dict[str, int] = {}
        """By record."""
        self.count(records)

    def count(self, changes: Mapping[str, bytes | None]) -> None:
        """Records have other values now; None: they are gone."""
        for key, value in changes.items():
            place = _place(key)
            if place:
                before = self._checksums.pop(key, None)
                count, total = self._counts.get(place, 0), self._sums.get(place, 0)
                if before is not None:
                    count, total = count - 1, total - before
                if value is not None:
                    added = self._checksums[key] = _checksum(key, value)
                    count, total = count + 1, total + added
                self._counts[place], self._sums[place] = count, total % _SUMS

    def after(self, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
        """The records of the census that change with `changes`, as they are to be then."""
        counts, sums = dict[str, int](), dict[str, int]()
        for key, value in changes.items():
            place, before = _place(key), self._checksums.get(key)
            after = None if value is None else _checksum(key, value)
            if place and before != after:
                counts[place] = counts.get(place, 0) + (after is not None) - (before is not None)
                sums[place] = sums.get(place, 0) + (after or 0) - (before or 0)
        return {
            place: _record(self._counts.get(place, 0) + counts[place], (self._sums.get(place, 0) + sums[place]) % _SUMS)
            for place in counts
        }

    def missing(self, records: Mapping[str, bytes]) -> dict[str, bytes | None]:
        """The changes that complete the census among `records`.

        Raises `MetadataDamaged` if a record of the census says something else than what has been counted.
        """
        since = census_since(records[LEADER]) if LEADER in records else 0
        there = {place: value for place, value in records.items() if place.startswith(CENSUS) and place != SINCE}
        counted = {place: _record(count, self._sums[place]) for place, count in self._counts.items() if count}
        if _number(records.get(SINCE)) < since:  # not kept all the time
            return {**dict.fromkeys(there), **counted, SINCE: str(since).encode()}
        for place, value in there.items():
            self._check(place, value)
        return {place: value for place, value in counted.items() if place not in there}

    def _check(self, place: str, value: bytes) -> None:
        below = place.removeprefix(CENSUS)
        where = "with keys of one component" if below == _TOP else f"below {below}/"
        try:
            found = json.loads(value)
            written, total = int(found["records"]), int(found["sum"])
        except (ValueError, LookupError, TypeError) as error:
            raise _damaged(place, f"record {place} cannot be read ({error})") from error
        count = self._counts.get(place, 0)
        if count != written:
            raise _damaged(
                place, f"{_words(written)} {where} should be there, and {count} {'is' if count == 1 else 'are'}"
            )
        if self._sums.get(place, 0) != total:
            raise _damaged(place, f"{_words(count)} {where} should be there, and others were found")


def _place(key: str) -> str:
    """The key of the census' record that counts a record; empty: none does."""
    if key == LEADER or key.startswith(CENSUS):
        return ""
    first, slash, _ = key.partition("/")
    return CENSUS + (first if slash else _TOP)


def _number(value: bytes | None) -> int:
    """Raises `MetadataDamaged`."""
    try:
        return int(value or b"0")
    except ValueError as error:
        raise _damaged(SINCE, f"record {SINCE} cannot be read ({error})") from error


def _checksum(key: str, value: bytes) -> int:
    return crc32c(value, crc32c(key.encode() + b"\0"))


def _record(count: int, total: int) -> bytes | None:
    return json.dumps({"records": count, "sum": total}).encode() if count else None


def _words(count: int) -> str:
    return f"{count} record{'' if count == 1 else 's'}"


def _damaged(place: str, problem: str) -> MetadataDamaged:
    return MetadataDamaged(
        f"the metadata are damaged: {problem}; put a copy back with kera cluster restore FILE --force, or delete record"
        f" {place} to go on with what is there",
        key=place,
    )
