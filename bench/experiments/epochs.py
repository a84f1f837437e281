"""Epochs against a strict merge, as StreamMine3G has them: the one experiment that is not of the thesis.

`bench.epochs` measures in this process, to compare the work of readers and not the speed of a cluster. So throughput is
by the processor time of the reader, which other load of the machine disturbs least.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from bench import epochs
from bench.experiments.measure import Measured
from bench.experiments.setup import RECORD_BYTES, Claim, Experiment, Point, Sample, Setup

RECORDS_MAX = 3_200_000
PLAIN, ENTRY_ORDER, ORDERED, STRICT = epochs.PLAIN, epochs.ENTRY_ORDER, epochs.ORDERED, epochs.STRICT

EXPERIMENT = Experiment(
    name="epochs",
    figures="epochs (StreamMine3G, chapters 4 and 5)",
    title="Reading eight streamlets in epochs, in one order, and strictly merged",
    x_label="epoch, ms (chunks end where epochs do)",
    points=tuple(
        Point(series, epoch_ms, Setup(streamlets=epochs.STREAMLETS, consumer="push"))
        for series in epochs.READERS
        for epoch_ms in epochs.EPOCHS_MS
    ),
    thesis="(StreamMine3G.) Merging by epochs brings at least twice what a strict order does, unless epochs are tiny;"
    " then one should order strictly (figures 5.8, 5.11). Latency is half an epoch (figure 4.5). In table 4.1 events"
    " wait for 8 turns with strict order, 4 with epochs of 3, and 0 without order.",
    claims=(
        Claim(
            "Epochs cost a reader little: in the order of entries over a plain consumer, 1,000 ms",
            (ENTRY_ORDER, 1000),
            (PLAIN, 1000),
            least=0.7,
            metric="consumed",
        ),
        Claim(
            "Merging by epochs brings twice a strict merge: 100 ms",
            (ORDERED, 100),
            (STRICT, 100),
            least=2,
            metric="consumed",
        ),
        Claim("And more with longer epochs: 10 s", (ORDERED, 10_000), (STRICT, 10_000), least=2, metric="consumed"),
        Claim("Tiny epochs lose: 1 ms", (ORDERED, 1), (STRICT, 1), most=1, metric="consumed"),
    ),
    plotted="consumed",
    note="Table 4.1 is a unit test, with the same 8, 4 and 0; listing 5.1 as printed gives out epochs by their place in"
    " each channel, so that one without events shifts the next, which a test excludes here. The dissertation's epochs"
    " are of events as they arrive, ours of a log that is read; its nodes are other machines. Throughput is by the"
    " processor time of the reader alone. The strict merge orders times and places of records, and touches no values."
    " Latency: `python -m bench.epochs_live`.",
)


def measure(experiment: Experiment, *, rounds: int, seconds: float, folder: Path) -> Measured:
    """Measure all points; histories have a size, so `seconds` has no effect."""
    del experiment, seconds
    samples: dict[tuple[str, int], list[Sample]] = {}
    with epochs.cluster(folder / "epochs") as running:
        load = os.getloadavg()[0]
        for epoch_ms, name, reading in epochs.readings(
            running, epochs.EPOCHS_MS, rounds=rounds, records_max=RECORDS_MAX
        ):
            samples.setdefault((name, epoch_ms), []).append(dataclasses.replace(sample_of(reading), load=load))
            load = os.getloadavg()[0]
    return Measured(samples, {})


def sample_of(reading: epochs.Reading) -> Sample:
    """A reading in the form of the page: MB of values per second of the reader's processor time."""
    gb = reading.records * RECORD_BYTES / 1e9
    return Sample(
        produced_mb_per_s=0.0,
        consumed_mb_per_s=reading.millions_per_core_s * RECORD_BYTES,
        producers_s_per_gb=0.0,
        brokers_s_per_gb=reading.broker_s / gb,
        backups_s_per_gb=0.0,
        consumers_s_per_gb=reading.client_s / gb,
    )
