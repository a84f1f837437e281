"""Clicks of users on the web and in the app, two streams, as the sessions of each user: in one order, the same for all.

Who goes on in the app with what was begun on the web has clicks in both streams. An ordered consumer gives those of
both in one order, by time (docs/epochs.md). So what is known of a user at a click is all that went before, and whoever
reads, however fast, finds the same sessions in the same order. No Spark is needed.
"""

# %% A cluster that runs
import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap


# %% Clicks of a morning, the same each time that this is run
class Click(NamedTuple):
    """What a user did."""

    at: datetime
    user: str
    place: str
    page: str


BEGIN = datetime(2026, 3, 2, 9, tzinfo=UTC)
HOURS = 3
PLACES = ("web", "app")
PAGES = ("home", "search", "tea", "jam", "cart", "pay")


def made_up_clicks() -> list[Click]:
    """In the order of time. Users come back after a while, and now and then change over from the web to the app."""
    chance = random.Random(11)
    found = []
    for user in ("ada", "bob", "cleo", "dan"):
        at, place = BEGIN + timedelta(minutes=chance.randrange(30)), chance.choice(PLACES)
        while at < BEGIN + timedelta(hours=HOURS):
            for page in PAGES[: chance.randint(2, len(PAGES))]:
                found.append(Click(at, user, place, page))
                at += timedelta(seconds=chance.randint(5, 400))
                place = chance.choice(PLACES) if chance.random() < 0.3 else place
            at += timedelta(minutes=chance.randint(40, 90))
    return sorted(click for click in found if click.at < BEGIN + timedelta(hours=HOURS))


# %% Two streams with epochs of ten minutes; what is over is told by those who write, as the times are not now
EPOCH_MS = 600_000
streams = {place: f"clicks-{place}-{time.time_ns()}" for place in PLACES}


def microseconds(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000


def epoch_of(at: datetime) -> int:
    return microseconds(at) // (1000 * EPOCH_MS)


async def write(client: Client, place: str) -> None:
    """All clicks of a place, by user. A producer closes chunks where epochs end, so that none of them is late."""
    async with client.producer() as producer:
        await producer.prepare(streams[place])
        for click in made_up_clicks():
            if click.place == place:
                producer.send(
                    streams[place], click.page.encode(), keys=click.user.encode(), timestamp_us=microseconds(click.at)
                )
        await producer.punctuate(streams[place], microseconds(BEGIN + timedelta(hours=HOURS)))


# %% The query: who does nothing for half an hour has left
GAP = timedelta(minutes=30)


class Sessions:
    """Of all users, from clicks in the order of time."""

    def __init__(self) -> None:
        self._open: dict[str, list[Click]] = {}
        """By user; who clicked last comes last."""

    def add(self, click: Click) -> Iterator[str]:
        """Take one; a line for each session that is over by then."""
        yield from self.over(click.at)
        self._open[click.user] = [*self._open.pop(click.user, ()), click]

    def over(self, now: datetime) -> Iterator[str]:
        """Those in which nothing has happened for too long."""
        while self._open:
            user, clicks = next(iter(self._open.items()))
            if now - clicks[-1].at <= GAP:
                break
            del self._open[user]
            yield f"{clicks[0].at:%H:%M}-{clicks[-1].at:%H:%M} {user:4} {_path(clicks)}"


def _path(clicks: list[Click]) -> str:
    words, place = list[str](), ""
    for click in clicks:
        if click.place != place:
            place = click.place
            words.append(f"[{place}]")
        words.append(click.page)
    return " ".join(words)


async def read(client: Client, **settings: Any) -> list[str]:
    """All sessions. `settings` are those of the consumer: they change how fast it is, and nothing else."""
    sessions, found = Sessions(), list[str]()
    place_of = {stream: place for place, stream in streams.items()}
    end = BEGIN + timedelta(hours=HOURS)
    first, last = epoch_of(BEGIN), epoch_of(end)
    async with client.ordered_consumer(*streams.values(), start=first, end=last, **settings) as consumer:
        async for record in consumer:
            at = datetime.fromtimestamp(record.timestamp_us / 1_000_000, UTC)
            found += sessions.add(Click(at, record.key.decode(), place_of[record.stream], record.value.decode()))
    return found + list(sessions.over(end + 2 * GAP))


async def run() -> tuple[list[str], list[str]]:
    async with await Client.connect(bootstrap) as client:
        for stream in streams.values():
            await client.admin.create_stream(stream, streamlets=2, epoch_ms=EPOCH_MS, punctuation="producers")
        await asyncio.gather(*(write(client, place) for place in PLACES))
        return await read(client), await read(client, shared_memory="never", prefetch_bytes_max=1 << 16)


found, found_again = asyncio.run(run())

# %% What was found
for line in found:
    print(line)
print("the other reader finds", "the same" if found_again == found else "something else")


# %% The end
async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        for stream in streams.values():
            await client.admin.delete_stream(stream)


asyncio.run(delete())
