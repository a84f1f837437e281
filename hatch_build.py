"""What hatchling runs while it builds the wheel: adds the jar of the Spark connector's columnar engine.

The jar is built, not kept in git, and building it takes a JDK and pyspark. The client can be built without either, for
those who say so. The environment variable KERA_JAR decides:

    require  without the jar there is no wheel; an isolated build gets itself a pyspark for it
    (unset)  the same, without the pyspark: then the jar has to be there, or what builds it
    auto     where the jar is neither current nor can be built, the wheel has none, and a line says so
    skip     the wheel has no jar, and nothing is built

So nobody publishes a wheel without the jar and does not know.

An editable install uses the jar in the tree, which `make jar` builds. The sdist has the sources.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

POLICIES = ("require", "auto", "skip")

WAY_OUT = (
    "KERA_JAR=skip builds a wheel without the Spark connector's columnar engine;"
    " KERA_JAR=require gets an isolated build its pyspark, and JAVA_HOME names a JDK"
)


class JarHook(BuildHookInterface[Any]):
    """Puts the jar into the wheel, as KERA_JAR says."""

    def dependencies(self) -> list[str]:
        """What an isolated build environment needs besides hatchling."""
        if os.environ.get("KERA_JAR") != "require":
            return []  # not by default: this is asked for editable installs, too, which need no jar
        spark: list[str] = self.metadata.core.optional_dependencies["spark"]
        return spark

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the jar before the wheel is put together."""
        if version == "editable" or policy() == "skip":
            return
        program = build_program(Path(self.root))
        try:
            program.build()
        except program.NotPossible as error:
            if policy() == "require":
                error.add_note(WAY_OUT)
                print(f"kera: error: no wheel without the jar: {error}. {WAY_OUT}", file=sys.stderr)
                raise
            print(f"kera: built without the Spark connector's columnar engine (see KERA_JAR): {error}", file=sys.stderr)
            return
        build_data["force_include"][str(program.JAR)] = f"kera/spark_connector/jars/{program.JAR.name}"


def policy() -> str:
    """What KERA_JAR says.

    Raises:
        ValueError: nothing that is known.
    """
    value = os.environ.get("KERA_JAR") or POLICIES[0]
    if value not in POLICIES:
        raise ValueError(f"KERA_JAR={value}: one of {', '.join(POLICIES)}")
    return value


def build_program(root: Path) -> ModuleType:
    """The program that builds the jar, imported from its file: the environment of a build has no kera."""
    spec = importlib.util.spec_from_file_location("kera_jar", root / "spark_connector" / "jvm" / "build.py")
    if spec is None or spec.loader is None:
        raise ImportError("spark_connector/jvm/build.py is missing")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program
