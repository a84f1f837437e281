"""A process keeps the memory that it frees."""

import os
import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
from kera.core.base.freed_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()

def message():
    pieces = [b"x" * (1 << 20) for _ in range(8)]
    b"".join(pieces)

message()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    message()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of a process that makes and frees messages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = [sys.executable, "-c", COUNT_FAULTS, how]
    return int(subprocess.run(run, capture_output=True, check=True, env=environment, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that learns")
def test_a_process_that_keeps_freed_memory_has_few_page_faults() -> None:
    assert faults("keep") < 1000 < faults("leave")
