"""Decisions of the benchmark of epochs about histories and figures; its measurements are not tested."""

import argparse
from pathlib import Path

import pytest

from bench import epochs
from bench.common import Figures
from bench.experiments.epochs import EXPERIMENT, sample_of


@pytest.mark.parametrize("epoch_ms", epochs.EPOCHS_MS)
def test_a_history_has_whole_chunks_and_epochs(epoch_ms: int) -> None:
    records = epochs.history_records(epoch_ms, 800_000)
    of_epoch = epochs.STREAMLETS * epochs.RECORDS_PER_MS * epoch_ms
    assert records % of_epoch == 0
    assert (epochs.RECORDS_PER_MS * epoch_ms) % epochs.chunk_records(epoch_ms) == 0, "chunks end where epochs do"
    assert records <= max(800_000, of_epoch)
    assert records // epochs.chunk_records(epoch_ms) <= epochs.CHUNKS_MAX


def test_the_curve_has_a_line_for_each_length_of_epochs() -> None:
    figures = Figures("epochs", argparse.Namespace(), Path())
    for epoch_ms in (1, 1000):
        for name, value in ((epochs.PLAIN, 40), (epochs.ENTRY_ORDER, 30), (epochs.ORDERED, 10), (epochs.STRICT, 2)):
            figures.add(epochs.core_figure(epoch_ms, name), value, "M/core-s")
    lines = epochs.table(figures, (1, 1000)).splitlines()
    assert lines[2] == "| 1 ms | 2 | 40 | 30 (0.75 of plain) | 10 (0.25) | 2 | 5 |"
    assert len(lines) == 4


def test_a_reading_is_measured_by_the_readers_processor_time() -> None:
    sample = sample_of(epochs.Reading(records=1_000_000, seconds=9.0, client_s=0.5, broker_s=0.1))
    assert sample.consumed_mb_per_s == 200
    assert (sample.consumers_s_per_gb, sample.brokers_s_per_gb) == (5.0, 1.0)


def test_every_reader_is_a_point_of_the_experiment() -> None:
    assert {point.series for point in EXPERIMENT.points} == set(epochs.READERS)
