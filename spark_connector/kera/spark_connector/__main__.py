"""``python -m kera.spark_connector jar`` prints where the columnar engine's jar is, for ``spark-submit --jars``."""

from __future__ import annotations

import sys

from kera.core.errors import KeraError
from kera.spark_connector.engine import jar_path


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit code."""
    if arguments != ["jar"]:
        sys.stderr.write("usage: python -m kera.spark_connector jar\n")
        return 2
    try:
        sys.stdout.write(f"{jar_path()}\n")
    except KeraError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
