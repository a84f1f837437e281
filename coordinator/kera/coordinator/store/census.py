"""The census of the records: how many there are below each first component of their keys, and a sum over them.

A store returns what is in it. In ZooKeeper, somebody can delete or change a record, and a reader would take the rest
for all of it: a deleted stream would never have existed. So each write also writes the census of what it changes, in
the same transaction, and a coordinator checks the census before it relies on the records.

    census/<first component>   JSON: records, sum (of the CRC-32C of key and value of each, modulo 2^32)
    census/.                   of the records whose key has one component
    census/.since              epoch of the first term for which it holds

A missing census is taken anew: for metadata from before there were any, and for metadata that were restored. So an
operator can delete it to continue with the remaining records. The record of the leader does not count: each term writes
it.

During an upgrade, a coordinator of an earlier version may lead in between, and write records without counting them. Its
record of the leader does not have ``census_since``, so the next term has a later one than ``census/.since``, and takes
the whole census anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kera.coordinator.store.leadership import LEADER, census_since
from kera.coordinator.store.metadata import MetadataDamaged
from kera.core.format.checksum import crc32c

CENSUS = "census/"
SINCE = CENSUS + ".since"
_TOP = "."
_SUMS = 1 << 32


class _Tally(NamedTuple):
    records: int = 0
    sum: int = 0

    def plus(self, key: str, value: bytes | None, sign: int = 1) -> _Tally:
        """Return the tally with one record more, or with -1 as `sign` one less; None: there is no such record."""
        if value is None:
            return self
        return _Tally(self.records + sign, (self.sum + sign * _checksum(key, value)) % _SUMS)

    def to_record(self) -> bytes | None:
        return json.dumps(self._asdict()).encode() if self.records else None


def counted_with(changes: Mapping[str, bytes | None], get: Callable[[str], bytes | None]) -> dict[str, bytes | None]:
    """Return `changes` together with the resulting changes of the census; `get` reads the records before. Pure.

    Raises `MetadataDamaged` if a record of the census cannot be read.
    """
    tallies = dict[str, _Tally]()
    for key, value in changes.items():
        if place := _place(key):
            tally = tallies[place] if place in tallies else _read(place, get(place))
            tallies[place] = tally.plus(key, get(key), -1).plus(key, value)
    return {**changes, **{place: tally.to_record() for place, tally in tallies.items()}}


def missing_in(records: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return the changes that complete the census among `records`. Pure.

    Raises `MetadataDamaged` if a record of the census does not agree with the records.
    """
    tallies = dict[str, _Tally]()
    for key, value in records.items():
        if place := _place(key):
            tallies[place] = tallies.get(place, _Tally()).plus(key, value)
    counted = {place: tally.to_record() for place, tally in tallies.items()}
    there = {place: value for place, value in records.items() if place.startswith(CENSUS) and place != SINCE}
    since = census_since(records[LEADER]) if LEADER in records else 0
    if _number(records.get(SINCE)) < since:  # some term since has not kept it
        return {**dict.fromkeys(there), **counted, SINCE: str(since).encode()}
    for place, value in there.items():
        _compare(place, _read(place, value), tallies.get(place, _Tally()))
    return {place: value for place, value in counted.items() if place not in there}


def _compare(place: str, written: _Tally, found: _Tally) -> None:
    below = place.removeprefix(CENSUS)
    where = "with keys of one component" if below == _TOP else f"below {below}/"
    if found.records != written.records:
        there = f"{found.records} {'is' if found.records == 1 else 'are'}"
        raise _damaged(place, f"{_words(written.records)} {where} should be there, and {there}")
    if found.sum != written.sum:
        raise _damaged(place, f"{_words(written.records)} {where} should be there, and others were found")


def _read(place: str, value: bytes | None) -> _Tally:
    if value is None:
        return _Tally()
    try:
        found = json.loads(value)
        return _Tally(int(found["records"]), int(found["sum"]))
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(place, f"record {place} cannot be read ({error})") from error


def _place(key: str) -> str:
    """Return the key of the census' record that counts a record; empty: none does."""
    if key == LEADER or key.startswith(CENSUS):
        return ""
    first, slash, _ = key.partition("/")
    return CENSUS + (first if slash else _TOP)


def _number(value: bytes | None) -> int:
    """Return a number in a record. Raises `MetadataDamaged`."""
    try:
        return int(value or b"0")
    except ValueError as error:
        raise _damaged(SINCE, f"record {SINCE} cannot be read ({error})") from error


def _checksum(key: str, value: bytes) -> int:
    return crc32c(value, crc32c(key.encode() + b"\0"))


def _words(count: int) -> str:
    return f"{count} record{'' if count == 1 else 's'}"


def _damaged(place: str, problem: str) -> MetadataDamaged:
    return MetadataDamaged(
        f"the metadata are damaged: {problem}; put a copy back with kera cluster restore FILE --force, or delete record"
        f" {place} to go on with what is there",
        key=place,
    )
