"""A producer or consumer of Kafka that is one of its perf tools, see `bench.compare.worker`.

The tool's reports, ten a second, are taken as they come. A producer tool is stopped at the end of the time; records
that it has not reported as acknowledged by then do not count, not even as sent. With a backlog the tool gets the number
of records, and ends itself.

A JVM takes time to start and to compile, which should not count. The tool reads its properties from a pipe: with a
backlog it gets them when it is to begin, else before, so that it is as fast as it can be when counting begins. A
consumer is counted from its first report with records: until then it has loaded classes and joined its group.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from bench.compare.peers.servers import bound
from bench.compare.worker import Worker, make_values, peak_rss_bytes, run
from bench.kafka import JVM

REPORT_MS = 100
MANY = 10**12
PATIENCE_MS = 600_000
BUFFER_BYTES = 64 << 20
"""With four times as many, the garbage collector takes a processor, and halves the tool's speed."""
VALUES = 1_000
WARM_UP_S = 10.0
"""A warm-up at full speed; seven seconds are not enough."""
FETCH_BYTES = 8 << 20
PRODUCED = re.compile(r"(\d+) records sent, [\d.,]+ records/sec \([\d.,]+ MB/sec\), .* max latency\.")
CONSUMED_COLUMN = 4
"""data.consumed.in.nMsg, of ``--show-detailed-stats``."""


def produced(line: str) -> int | None:
    """The number of records that a line of the producer tool reports as acknowledged since the line before."""
    found = PRODUCED.match(line)
    return int(found[1]) if found else None


def produced_in_all(line: str) -> int | None:
    """The number of records in the producer tool's last line, which is the only one with percentiles."""
    found = re.match(r"(\d+) records sent, .* 99\.9th\.", line)
    return int(found[1]) if found else None


def consumed(line: str) -> int | None:
    """The number of records that a line of the consumer tool reports since its beginning."""
    columns = [column.strip() for column in line.split(",")]
    with contextlib.suppress(IndexError, ValueError):
        return int(columns[CONSUMED_COLUMN])
    return None


def producer_properties(worker: Worker) -> dict[str, object]:
    """Large batches, which linger at least 5 ms, and a buffer for many; a table ``[settings.kafka-java]`` can change
    this.
    """
    workload, settings = worker.workload, worker.task.settings
    return {
        "bootstrap.servers": settings["bootstrap"],
        "acks": settings["acks"],
        "batch.size": max(int(workload.batch_bytes), 1 << 20),
        "linger.ms": max(int(workload.linger_ms), 5),
        "buffer.memory": BUFFER_BYTES,
        "max.request.size": 8 << 20,
        "enable.idempotence": "false",
        **workload.settings.get("kafka-java", {}),
    }


def producer_arguments(worker: Worker, values: Path) -> list[str]:
    """Full speed, with values from a file: generating them takes the tool longer than sending them."""
    return [
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", worker.task.settings["topics"][0]),
        *("--num-records", str(worker.task.records_max or MANY)),
        *("--payload-file", str(values)),
        *("--throughput", "-1"),
        *("--reporting-interval", str(REPORT_MS)),
    ]


CONSUMER_PROPERTIES = {"fetch.max.bytes": 64 << 20, "max.poll.records": 10_000}


def consumer_arguments(worker: Worker) -> list[str]:
    """The consumer's arguments, with another group in each round."""
    settings = worker.task.settings
    topic = settings["topics"][0]
    return [
        "org.apache.kafka.tools.ConsumerPerformance",
        *("--bootstrap-server", settings["bootstrap"]),
        *("--topic", topic),
        *("--group", f"readers-of-{topic}"),
        *("--num-records", str(worker.workload.backlog_records)),
        *("--timeout", str(PATIENCE_MS)),
        *("--fetch-size", str(FETCH_BYTES)),
        *("--reporting-interval", str(REPORT_MS)),
        *("--show-detailed-stats", "--hide-header"),
    ]


def produce(worker: Worker) -> None:
    """Count the tool's reports as acknowledgements."""
    with tempfile.TemporaryDirectory(prefix="kera-bench-") as folder:
        values = Path(folder) / "values"
        values.write_bytes(b"\n".join(make_values(worker.workload.record_bytes, VALUES)))
        with _Tool(worker, producer_arguments(worker, values), Path(folder)) as tool:
            if worker.task.records_max is None:
                tool.begin(producer_properties(worker))
                time.sleep(WARM_UP_S)
                worker.begin_blocking()  # earlier reports are read, and not counted, before counting begins
            else:
                worker.begin_blocking()
                tool.begin(producer_properties(worker))
            _follow_producer(worker, tool.process)


def _follow_producer(worker: Worker, tool: subprocess.Popen[str]) -> None:
    assert tool.stdout is not None  # noqa: S101 - it is a pipe
    total, records_max = 0, worker.task.records_max
    for line in tool.stdout:
        if (records := produced(line)) is None and (whole := produced_in_all(line)) is not None:
            records = whole - total
        if records:
            total += records
            worker.sent(records)
            worker.acknowledged(records)
        if not worker.more and records_max is None:
            return
    if not total or (records_max is not None and total < records_max):
        raise RuntimeError(f"the tool ended with {tool.wait()} after {total} records")


def consume(worker: Worker) -> None:
    """Count the tool's reports as seen records."""
    with (
        tempfile.TemporaryDirectory(prefix="kera-bench-") as folder,
        _Tool(worker, consumer_arguments(worker), Path(folder)) as tool,
    ):
        worker.begin_blocking()
        tool.begin(CONSUMER_PROPERTIES)
        threading.Thread(target=_follow_consumer, args=(worker, tool), daemon=True).start()
        worker.stopped.wait()
        result = worker.result()
        worker.own = replace(result, peak_rss_bytes=result.peak_rss_bytes + tool.peak_bytes)


def _follow_consumer(worker: Worker, tool: _Tool) -> None:
    assert tool.process.stdout is not None  # noqa: S101 - it is a pipe
    before = 0
    for line in tool.process.stdout:
        if records := consumed(line):
            tool.peak_bytes = peak_rss_bytes(tool.process.pid) or tool.peak_bytes  # an ended process has none
            now_ns = time.monotonic_ns()
            if not before:
                worker.start_ns = now_ns + 1  # these came before it
            worker.seen(records - before, now_ns)
            before = records
    if tool.ended_well():  # it reports whole intervals, and ends when it has read all
        worker.seen(worker.workload.backlog_records - before)


class _Tool:
    """A running process that waits for its properties. At the end it is stopped, to be measured like its worker."""

    def __init__(self, worker: Worker, arguments: Sequence[str], folder: Path) -> None:
        pipe, settings = folder / "properties", worker.task.settings
        os.mkfifo(pipe)
        argv = [settings["java"], *JVM, "-cp", f"{settings['tools']}/*", *arguments, "--command-config", str(pipe)]
        self.process = subprocess.Popen(
            bound(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.peak_bytes = 0
        """The peak of its memory in the samples so far."""
        self._properties = self._opened(pipe)

    def _opened(self, pipe: Path) -> int:
        while self.process.poll() is None:
            with contextlib.suppress(OSError):  # without a reader yet
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.01)
        raise RuntimeError(f"the tool ended with {self.process.returncode}: {self.process.communicate()[0][-500:]}")

    def begin(self, properties: Mapping[str, object]) -> None:
        """Let it begin."""
        with os.fdopen(self._properties, "w") as pipe:
            pipe.writelines(f"{name}={value}\n" for name, value in properties.items())

    def ended_well(self) -> bool:
        """Wait until it ends."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGSTOP)  # it is killed with its worker


if __name__ == "__main__":
    sys.exit(run(produce, consume))
