"""Copies by ``kera connect`` between a Kafka and a KerA on this machine, beside Kafka's own MirrorMaker 2.

* ``to kera``: a topic of `--records` records becomes a stream; with `--kills`, the copying process is killed (kill -9)
  this many times at random moments, and started again;
* ``to kafka``: the stream becomes a topic, each batch in a transaction, likewise;
* ``mirror``: MirrorMaker 2 copies the topic into another one of the same Kafka, as it does by default: at least once.

Each starts from nothing, and is timed from its first written record to its last; the time includes restarts after
kills. Then all copied records are read, and must be there once, in order. Kafka is the one of ``scripts/kafka.sh``; the
disk has three copies of the records at most, and they go at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pyarrow as pa

from bench import kafka
from bench.common import parser, say
from bench.compare.peers.install import java
from kera.client import Client
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

PARTITIONS = 4
DIGITS = 12
TIMEOUT_S = 600.0
PAUSE_S = 0.05
MIRROR = """
clusters = from, to
from.bootstrap.servers = {bootstrap}
to.bootstrap.servers = {bootstrap}
from->to.enabled = true
from->to.topics = records
to->from.enabled = false
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
config.storage.replication.factor = 1
emit.heartbeats.enabled = false
emit.checkpoints.enabled = false
tasks.max = {tasks}
"""


def value_of(number: int, size: int) -> bytes:
    """The record with this number."""
    return b"%0*d" % (DIGITS, number) + b"x" * (size - DIGITS)


def fill(broker: kafka.Kafka, topic: str, records: int, size: int) -> None:
    """Write records, in turns over the partitions."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
    )
    for number in range(records):
        while True:
            try:
                producer.produce(topic, value_of(number, size), partition=number % PARTITIONS)
            except BufferError:
                producer.poll(0.1)
            else:
                break
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def ends(broker: kafka.Kafka, topic: str) -> int:
    """The number of offsets of a topic, all partitions together."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "bench", "log_level": 0})
    try:
        if topic not in consumer.list_topics(timeout=10).topics:
            return 0
        return sum(
            consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, number), timeout=10)[1]
            for number in range(PARTITIONS)
        )
    except confluent_kafka.KafkaException:  # it is still being created
        return 0
    finally:
        consumer.close()


def copy(bootstrap: str, source: str, target: str, kills: int, chance: random.Random) -> dict[str, Any]:
    """Run a copy to its end, killed `kills` times on the way; returns the last process's report, and the total time."""
    command = [sys.executable, "-m", "kera.cli", "connect", "copy", "--json", "--create", "-b", bootstrap]
    begun_s = time.monotonic()
    for number in range(kills + 1):
        process = subprocess.Popen([*command, source, target], stdout=subprocess.PIPE)
        if process.stdout is None:
            raise AssertionError("no pipe")
        first = json.loads(process.stdout.readline())
        if number == 0:
            begun_s = time.monotonic()
        if number < kills:
            time.sleep(chance.uniform(0.2, 2.0))
            process.kill()
            process.wait()
            continue
        *_, last = [json.loads(line) for line in process.stdout]
        if process.wait():
            raise AssertionError(f"the copy from {source} failed")
        return {**last, "records_before": first["records_before"], "seconds": time.monotonic() - begun_s}
    raise AssertionError("unreachable")


async def check_stream(bootstrap: str, stream: str, records: int) -> None:
    """Check that each record is there once, in the order of its partition."""
    reached = list(range(PARTITIONS))
    async with await Client.connect(bootstrap) as client:
        consumer = client.consumer(stream, start="earliest", end="latest")
        async with consumer:
            async for chunk in consumer.batches():
                streamlet = chunk.entry.streamlet_id
                reached[streamlet] = _checked(chunk.batch.column("value"), reached[streamlet])
    _check_ends(reached, records)


def check_topic(broker: kafka.Kafka, topic: str, records: int) -> None:
    """The same for a topic, as read by a consumer of committed records."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "check",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    reached = list(range(PARTITIONS))
    ended: set[int | None] = set()
    while len(ended) < PARTITIONS:
        values: dict[int, list[bytes | None]] = {}
        for message in consumer.consume(50_000, 0.2):
            if message.error() is None:
                values.setdefault(message.partition() or 0, []).append(message.value())
            else:
                ended.add(message.partition())
        for partition, found in values.items():
            reached[partition] = _checked(pa.array(found, pa.binary()), reached[partition])
    consumer.close()
    _check_ends(reached, records)


def _checked(values: pa.Array, expected: int) -> int:
    numbers = pa.compute.binary_slice(values, 0, DIGITS).cast(pa.string()).cast(pa.int64()).to_numpy()
    wanted = np.arange(expected, expected + len(numbers) * PARTITIONS, PARTITIONS)
    if not np.array_equal(numbers, wanted):
        at = int(np.argmax(numbers != wanted))
        raise AssertionError(f"record {numbers[at]} where {wanted[at]} should be")
    return int(expected + len(numbers) * PARTITIONS)


def _check_ends(reached: Sequence[int], records: int) -> None:
    whole = [each + -(-(records - each) // PARTITIONS) * PARTITIONS for each in range(PARTITIONS)]
    if list(reached) != whole:
        raise AssertionError(f"partitions end before {reached}, and should before {whole}")


def mirror(broker: kafka.Kafka, libs: Path, folder: Path, records: int) -> float:
    """Seconds from the first to the last record in the other topic."""
    settings = folder / "mirror.properties"
    settings.write_text(MIRROR.format(bootstrap=broker.bootstrap, tasks=PARTITIONS))
    main = "org.apache.kafka.connect.mirror.MirrorMaker"
    command = [java(), "-Xmx1g", "-cp", f"{libs}/*", main, str(settings)]
    with (folder / "mirror.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            first_s: float | None = None
            end_s = time.monotonic() + TIMEOUT_S
            while (there := ends(broker, "from.records")) < records:
                if there and first_s is None:
                    first_s = time.monotonic()
                if process.poll() is not None or time.monotonic() > end_s:
                    raise AssertionError(f"MirrorMaker ended: {(folder / 'mirror.log').read_text()[-2000:]}")
                time.sleep(PAUSE_S)
            return time.monotonic() - (first_s or time.monotonic())
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    """Run the requested parts."""
    arguments = parser(__doc__)
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--bytes", type=int, default=100, help="of a record's value")
    arguments.add_argument("--kills", type=int, default=0, help="of each copy")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--no-mirror", action="store_true")
    given = arguments.parse_args()
    libs = next((each.parent for each in sorted(Path("build/kafka").resolve().glob("*/.complete"))), None)
    if libs is None:
        say("there is no Kafka: sh scripts/kafka.sh fetches one")
        return 1
    folder = Path(tempfile.mkdtemp(prefix="kera-bench-connect-"))
    need = 4 * given.records * (given.bytes + 60)
    if shutil.disk_usage(folder).free < 2 * need:
        say(f"{folder} has no room for {need / 1e9:.0f} GB")
        return 1
    try:
        asyncio.run(measure(given, libs, folder))
    finally:
        shutil.rmtree(folder)
    return 0


async def measure(given: Any, libs: Path, folder: Path) -> None:
    """Run each part once."""
    chance, parts = random.Random(given.seed), kafka.Server(libs, Path(confluent_kafka.__file__).parents[1])
    size = given.records * given.bytes / 1e6
    cluster = LocalCluster(data_dir=folder / "kera", arena_bytes=512 * MIB)
    async with cluster:
        with kafka.running(parts, folder / "kafka") as broker:
            broker.create("records", PARTITIONS)
            await asyncio.to_thread(fill, broker, "records", given.records, given.bytes)
            say(f"{given.records:,} records of {given.bytes} bytes, {PARTITIONS} partitions, {given.kills} kills")
            url = f"kafka://{broker.bootstrap}"
            done = await asyncio.to_thread(
                copy, cluster.bootstrap, f"{url}/records", "kera:records", given.kills, chance
            )
            _say("to kera", given.records, size, done["seconds"])
            await check_stream(cluster.bootstrap, "records", given.records)
            done = await asyncio.to_thread(copy, cluster.bootstrap, "kera:records", f"{url}/back", given.kills, chance)
            _say("to kafka", given.records, size, done["seconds"])
            await asyncio.to_thread(check_topic, broker, "back", given.records)
            broker.delete("back")
            if not given.no_mirror:
                seconds = await asyncio.to_thread(mirror, broker, libs, folder, given.records)
                _say("mirror", given.records, size, seconds)


def _say(what: str, records: int, megabytes: float, seconds: float) -> None:
    say(f"{what:>16}: {seconds:7.1f} s  {records / seconds:10,.0f} records/s  {megabytes / seconds:7.1f} MB/s")


if __name__ == "__main__":
    sys.exit(main())
