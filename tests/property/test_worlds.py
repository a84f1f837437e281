"""Worlds, which are in memory, leave nothing behind, also after a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

_LEFT_OPEN = """
import sys
from tests.property.{module} import World
world = World({arguments})
assert world.root.is_dir()
print(world.root)
sys.exit("something has failed")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("log_world", "1, streams=[]"), pytest.param("replication_world", "", marks=pytest.mark.slow)],
)
def test_a_world_that_is_never_closed_leaves_no_directory(module: str, arguments: str) -> None:
    code = _LEFT_OPEN.format(module=module, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "something has failed"
    assert done.stdout.startswith("/dev/shm/kera-world-")
    assert not Path(done.stdout.strip()).exists()
