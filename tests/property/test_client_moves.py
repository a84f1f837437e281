"""Producers and consumers while streamlets move and brokers crash: all records are written and read once, in order."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.consuming.consumer import Consumer
from kera.client.producing.open_chunks.records import RECORD_OVERHEAD_BYTES
from kera.client.producing.producer import Producer
from kera.client.settings import ConsumerSettings, ProducerSettings
from tests.unit.client.fake_support import Fleet, a_fleet
from tests.unit.client.support import WAIT_S

STREAMLETS, BROKERS = 2, 3
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "move", "seal", "crash", "recover", "late", "pause"]),
        st.integers(0, STREAMLETS - 1),
        st.integers(1, BROKERS),
    ),
    max_size=30,
)


class Run:
    """The events, and the sent records."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sent: list[list[bytes]] = [[] for _ in range(STREAMLETS)]

    async def act(self, producer: Producer, kind: str, streamlet: int, broker_id: int) -> None:
        fake, stream = self.fleet.fake, self.fleet.s
        if kind == "send":
            for _ in range(3):
                self.sent[streamlet].append(b"%d" % len(self.sent[streamlet]))
                producer.send("s", self.sent[streamlet][-1], streamlet=streamlet)
        elif kind == "seal":
            stream.seal(streamlet)
        elif kind in {"move", "late"} and fake.brokers[broker_id].running:
            stream.move(streamlet, broker_id, opened=kind == "move")
        elif kind == "crash":
            left = [number for number, broker in fake.brokers.items() if broker.running and number != broker_id]
            if left:
                await fake.brokers[broker_id].crash()
                await asyncio.sleep(0.002)  # sleep: time for clients to notice, or not
                fake.take_over(broker_id, left[0])
        elif kind == "recover":
            fake.recovered()
            stream.open(streamlet)
        elif kind == "pause":
            await asyncio.sleep(0.003)  # sleep: passing time is one of the events
        await asyncio.sleep(0)

    def all_is_well(self) -> None:
        for streamlet_id in range(STREAMLETS):
            self.fleet.s.unseal(streamlet_id)
            self.fleet.s.open(streamlet_id)
        self.fleet.fake.recovered()


async def read(consumer: Consumer, counts: list[int]) -> list[list[bytes]]:
    found: list[list[bytes]] = [[] for _ in range(STREAMLETS)]
    if any(counts):
        async for chunk in consumer.batches():
            found[chunk.entry.streamlet_id] += chunk.batch["value"].to_pylist()
            if [len(values) for values in found] == counts:
                break
    return found


async def run(actions: list[tuple[str, int, int]], in_flight_max: int, fetch_bytes_max: int) -> None:
    async with asyncio.timeout(WAIT_S), a_fleet(brokers=BROKERS, streamlets=STREAMLETS) as fleet:
        await check(fleet, actions, in_flight_max, fetch_bytes_max)


async def check(fleet: Fleet, actions: list[tuple[str, int, int]], in_flight_max: int, fetch_bytes_max: int) -> None:
    happening, cluster = Run(fleet), fleet.cluster
    one_chunk = 3 * (RECORD_OVERHEAD_BYTES + 1)  # the records of one send
    options = ProducerSettings(chunk_bytes_max=one_chunk, request_bytes_max=400, requests_in_flight_max=in_flight_max)
    reading = ConsumerSettings(fetch_bytes_max=fetch_bytes_max, fetch_wait_ms=60_000)
    counts = [3 * actions_of(actions, streamlet) for streamlet in range(STREAMLETS)]
    async with Producer(cluster, options) as producer, Consumer(cluster, ("s",), reading, start="earliest") as consumer:
        await producer.prepare("s")
        taking = asyncio.ensure_future(read(consumer, counts))
        for action in actions:
            await happening.act(producer, *action)
        happening.all_is_well()
        await producer.flush()
        assert [fleet.s.values(number) for number in range(STREAMLETS)] == happening.sent
        assert await taking == happening.sent
        bounds = await cluster.bounds("s")
        assert [bounds[number][0].next_record for number in range(STREAMLETS)] == counts
    again = Consumer(cluster, ("s",), reading, start="earliest", end="latest")
    assert await read(again, [-1]) == happening.sent  # up to the end
    await again.close()


def actions_of(actions: list[tuple[str, int, int]], streamlet: int) -> int:
    return sum(kind == "send" and where == streamlet for kind, where, _ in actions)


@settings(max_examples=max(1, settings().max_examples // 2))
@given(ACTIONS, st.integers(1, 4), st.sampled_from([1, 1000, 1 << 20]))
def test_all_records_are_written_and_read_once_and_in_order(
    actions: list[tuple[str, int, int]], in_flight_max: int, fetch_bytes_max: int
) -> None:
    asyncio.run(run(actions, in_flight_max, fetch_bytes_max))
