"""gRPC writes nothing to the terminal of a user's program, unless the program asks for it."""

import os
import subprocess
import sys

import pytest

from tests.examples import first_quick

PROGRAM = """
import asyncio, os, {first}
FORKS = 20
environment = dict(os.environ)
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.v1 import coordinator_pb2
assert dict(os.environ) == environment

async def main():
    channel = GrpcChannel("127.0.0.1:1")
    try:
        await channel.submit(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest(), timeout_s=10)
    except KeraError:
        pass
    for _ in range(FORKS):  # gRPC has a message about those that happen while its own thread is in its core
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        await asyncio.sleep(0.01)
    await channel.close()

asyncio.run(main())
"""


def said(first: str, **environment: str) -> str:
    """Run the program with `first` imported before the rest of KerA, and return its standard error."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env=own | environment,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ended.stderr


@pytest.mark.parametrize(
    "first", first_quick(["kera.client", "kera.core.security", "kera.client.consuming.groups.keep_alive"], 1)
)
def test_grpc_writes_nothing_in_a_program_that_uses_kera(first: str) -> None:
    assert said(first) == ""


def test_grpc_writes_its_log_in_a_program_that_asks_for_it() -> None:
    assert "fork" in said("kera.client", GRPC_VERBOSITY="INFO", GRPC_ENABLE_FORK_SUPPORT="1")


@pytest.mark.slow
def test_grpc_writes_its_log_in_a_program_that_imports_it_first() -> None:
    assert "fork" in said("grpc")
