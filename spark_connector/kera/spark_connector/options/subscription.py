"""The streams that a query reads: by name, by pattern, or streamlet by streamlet."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kera.core.errors import InvalidArgument, StreamletOutOfRange, UnknownStream
from kera.spark_connector.options.names import ASSIGN, PATH, PATTERN, SUBSCRIBE
from kera.spark_connector.options.values import did_you_mean, listed, wrong

_WHICH = (SUBSCRIBE, PATH, PATTERN, ASSIGN)


@dataclass(frozen=True)
class Subscription:
    """The streams and streamlets to read. Exactly one of `names`, `pattern` and `assign` is set.

    With ``metadata=streams`` the user may leave all of them out: then `pattern` fits all streams.
    """

    names: tuple[str, ...] | None = None
    """Sorted, each once."""
    pattern: str | None = None
    """A regular expression for whole names."""
    assign: Mapping[str, tuple[int, ...]] | None = None
    """Streamlets per stream, sorted."""
    may_be_empty: bool = False
    """Whether a pattern may fit no stream, as with ``metadata=streams``; otherwise that is an error."""

    @property
    def named(self) -> tuple[str, ...] | None:
        """The names of all streams; None: a pattern selects them, and new streams may join."""
        return tuple(sorted(self.assign)) if self.assign is not None else self.names

    def fits(self, stream: str) -> bool:
        """Return whether a stream of this name is subscribed."""
        if self.named is not None:
            return stream in self.named
        return re.fullmatch(self.pattern or "", stream) is not None

    def select(self, there: Collection[str]) -> list[str]:
        """Return the subscribed streams of `there` (all names that the cluster has), sorted."""
        return sorted(filter(self.fits, there))

    def missing(self, there: Collection[str]) -> list[str]:
        """Return the subscribed names that are not in `there`, sorted; empty for a pattern."""
        return sorted(set(self.named or ()).difference(there))

    def require(self, there: Collection[str]) -> list[str]:
        """Do what `select` does; raises `UnknownStream`, with a did-you-mean, if a stream is missing or none fits.

        For `load`, batches and the begin of a query. A running query uses `select`: `planning.next_ends` handles
        streams that are deleted later.
        """
        for name in self.missing(there):
            raise UnknownStream(f"no stream is called '{name}'{did_you_mean(name, there)}", stream=name)
        selected = self.select(there)
        if not selected and not self.may_be_empty:
            raise UnknownStream(
                f"no stream fits the pattern '{self.pattern}'. It must fit the whole name; there are"
                f" {listed(there) or 'no streams yet'}",
                pattern=self.pattern,
            )
        return selected

    def streamlets(self, stream: str, there: Collection[int]) -> list[int]:
        """Return the subscribed streamlets of `there` (all that the stream has), sorted.

        Raises `StreamletOutOfRange` for an assigned streamlet that the stream does not have.
        """
        if self.assign is None:
            return sorted(there)
        wanted = self.assign.get(stream, ())
        absent = sorted(set(wanted).difference(there))
        if absent:
            raise StreamletOutOfRange(
                f"option {ASSIGN}: stream '{stream}' has no streamlet {absent[0]}; it has 0 to {max(there, default=0)}",
                stream=stream,
                streamlet=absent[0],
            )
        return sorted(wanted)


def subscription_of(given: Mapping[str, str], *, listing: bool) -> Subscription:
    """Return the subscription of the options; with `listing` (``metadata=streams``) they may have none."""
    named = [name for name in _WHICH if name in given]
    if not named and listing:
        return Subscription(pattern=".*", may_be_empty=True)
    if len(named) != 1:
        raise InvalidArgument(
            f'say once what to read: exactly one of {SUBSCRIBE}, {PATTERN}, {ASSIGN}, or .load("name");'
            f" {'none is given' if not named else 'given are ' + listed(named)}",
            option=SUBSCRIBE,
        )
    (option,) = named
    text = given[option].strip()
    if option == ASSIGN:
        return Subscription(assign=_assigned(text))
    if option == PATTERN:
        try:
            re.compile(text)
        except re.error as error:
            raise wrong(PATTERN, f"is not a regular expression of Python's re: {error}", text) from None
        if not text:
            raise wrong(PATTERN, "is empty; .* fits every name", text)
        return Subscription(pattern=text, may_be_empty=listing)
    names = sorted({name.strip() for name in text.split(",")} - {""})
    if not names:
        raise wrong(option, "names no stream", text)
    if option == PATH and "," in text:
        raise InvalidArgument(
            f"load({text!r}): load takes one stream; for several use option {SUBSCRIBE}", option=PATH, value=text
        )
    return Subscription(names=tuple(names))


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    form = 'must have the form {"stream": [0, 1]}'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise wrong(ASSIGN, form, text) from None
    if not isinstance(document, dict) or not document:
        raise wrong(ASSIGN, form, text)
    for name, streamlets in document.items():
        if not isinstance(streamlets, list) or not streamlets:
            raise wrong(ASSIGN, f"{form}: stream {name!r} has no list of streamlets", text)
        if any(type(streamlet) is not int or streamlet < 0 for streamlet in streamlets):
            raise wrong(ASSIGN, f"{form}: a streamlet of {name!r} is not a number from 0", text)
    return {name: tuple(sorted(set(streamlets))) for name, streamlets in document.items()}
