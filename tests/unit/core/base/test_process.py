"""Requests of a daemon's process to the operating system."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, OTHERS_WRITE, node_id, own_files

# The child shares the pipes of its parent with the test: it answers the test after the parent has died.
CHILD = """
import sys
from kera.core.base.process import die_with_parent
die_with_parent()
print("ready", flush=True)
print(sys.stdin.read(), end="")
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


@pytest.mark.parametrize(("value", "answer"), [("1", ""), (None, "alive"), ("0", "alive"), ("", "alive")])
def test_a_child_dies_with_its_parent_only_with_the_variable(value: str | None, answer: str) -> None:
    environment = dict(os.environ)
    environment.pop(DIE_WITH_PARENT_VARIABLE, None)
    if value is not None:
        environment[DIE_WITH_PARENT_VARIABLE] = value
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    assert parent.communicate("alive", timeout=60)[0] == answer


def test_a_child_ends_if_its_parent_died_before_the_request() -> None:
    program = (
        "import os, signal; from kera.core.base.process import die_with_parent; die_with_parent(os.getppid());"
        "print('asked', flush=True); die_with_parent(1 + os.getppid()); signal.pause()"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {DIE_WITH_PARENT_VARIABLE: "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )

    assert child.stdout == "asked\n"
    assert child.returncode == -signal.SIGTERM


def test_the_node_id_is_the_same_in_all_processes_of_a_host() -> None:
    other = subprocess.run(
        [sys.executable, "-c", "from kera.core.base.process import node_id; print(node_id())"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == node_id()


def test_the_node_id_differs_between_hosts_and_boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_id()

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        assert node_id() != here
    later = tmp_path / "boot_id"
    later.write_text("another boot\n")
    assert node_id(later) != here
    assert node_id(later).endswith("/another boot")


def test_a_kernel_without_a_boot_id_still_gives_a_node_id(tmp_path: Path) -> None:
    assert node_id(tmp_path / "missing").endswith("/unknown-boot")


def test_a_daemon_raises_its_descriptor_limit_to_the_maximum() -> None:
    program = (
        "import resource; from kera.core.base.process import descriptor_limit, raise_descriptor_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200));"
        "before = descriptor_limit(); raise_descriptor_limit(); print(before, descriptor_limit())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert run.stdout.split() == ["100", "200"]


@pytest.mark.parametrize(
    ("umask", "closed_to_others", "found"),
    [
        (0o022, 0, 0o022),
        (0o077, OTHERS_WRITE, 0o077),
        (0o000, OTHERS_WRITE, 0o022),
        (0o777, 0, 0o077),
        (0o000, 0, 0o000),
    ],
)
def test_the_umask_keeps_files_usable_for_the_owner_and_closed_to_others_writes(
    umask: int, closed_to_others: int, found: int
) -> None:
    before = os.umask(umask)
    try:
        own_files(closed_to_others)
    finally:
        assert os.umask(before) == found
