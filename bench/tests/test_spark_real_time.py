"""The benchmark of Spark's real-time mode: how it evaluates the files of its sink."""

from pathlib import Path

import numpy as np
import pytest

from bench.spark_real_time import stills_ms, tasks, waited

ROOM = 2

pytestmark = pytest.mark.timeout(60)


def write(folder: Path, name: str, opened_us: int, closed_us: int, *pairs: tuple[int, int]) -> None:
    """Write a file as the sink leaves it: with room for more."""
    longs = [opened_us, closed_us, *(value for pair in pairs for value in pair), *[0] * (2 * ROOM)]
    np.array(longs, np.int64).tofile(folder / name)


def test_records_due_while_their_task_stood_still_are_marked(tmp_path: Path) -> None:
    write(tmp_path, "0-0", 1_000, 9_000, (2_000, 2_001), (8_000, 8_001))
    write(tmp_path, "0-1", 1_000, 9_000, (3_000, 3_001))
    write(tmp_path, "1-0", 14_000, 0, (9_500, 15_000), (15_000, 15_001), (15_001, 15_002))

    found = tasks(tmp_path)

    assert [(task.partition, task.epoch) for task in found] == [(0, 0), (0, 1), (1, 0)]
    assert waited(found).tolist() == [False, False, True, True, False, False]
    assert stills_ms(found, from_us=0) == [5.0]
    assert stills_ms(found, from_us=9_001) == []


def test_a_file_that_is_being_written_is_no_task_yet(tmp_path: Path) -> None:
    (tmp_path / "0-0").touch()
    write(tmp_path, "0-1", 0, 0)

    assert tasks(tmp_path) == []
