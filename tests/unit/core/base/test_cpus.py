"""Lists of CPUs, and groups of a host's CPUs: with a directory in place of the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kera.core.base.cpus import allowed_cpus, format_cpus, grouped, parse_cpus, run_on
from kera.core.errors import InvalidArgument


def system(root: Path, *, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    """Write files as the kernel has them for a host."""
    for node, cpus in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(cpus + "\n")
    for cpu, threads in siblings.items():
        (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(threads + "\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 5 , 4 ", {4, 5}), ("7-7", {7}), ("8191", {8191})]
)
def test_a_list_of_cpus_is_parsed_and_formatted(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1,,2", "8192", "0-8192", "99999", "1.5", "١", "0-3-5"])
def test_an_invalid_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="write it as 0-3,8"):
        parse_cpus(text)


def test_consecutive_cpus_are_written_as_ranges() -> None:
    assert format_cpus([8, 1, 0, 2, 5]) == "0-2,5,8"
    assert format_cpus([]) == ""


def test_threads_of_a_core_and_cpus_of_a_node_belong_together(tmp_path: Path) -> None:
    """Two sockets of two cores of two threads, numbered as on most servers; a third node has memory only."""
    root = system(
        tmp_path,
        nodes={0: "0-1,4-5", 1: "2-3,6-7", 2: ""},
        siblings={cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)},
    )
    every = frozenset(range(8))

    assert grouped(every, "core", root) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert grouped(every, "numa", root) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert grouped(frozenset({1, 2, 6}), "core", root) == [{1}, {2, 6}]
    assert grouped(frozenset({1, 2, 6}), "numa", root) == [{1}, {2, 6}]


def test_without_kernel_files_each_cpu_is_a_core_and_all_are_a_node(tmp_path: Path) -> None:
    assert grouped(frozenset({0, 2}), "core", tmp_path) == [{0}, {2}]
    assert grouped(frozenset({0, 2}), "numa", tmp_path) == [{0, 2}]
    root = system(tmp_path, nodes={0: "nonsense"}, siblings={0: "\xff"})
    assert grouped(frozenset({0, 2}), "numa", root) == [{0, 2}]
    assert grouped(frozenset({0, 2}), "core", root) == [{0}, {2}]


def test_a_process_runs_on_the_given_cpus_or_says_why_not() -> None:
    before = allowed_cpus()
    try:
        run_on(frozenset({min(before)}))
        assert allowed_cpus() == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(InvalidArgument, match=r"cannot run on CPUs 8190: .*this process may run on"):
        run_on(frozenset({8190}))
    assert allowed_cpus() == before
