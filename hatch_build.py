"""Hatchling runs this hook while it builds a wheel: of `kera`, and of each distribution in ``distributions``.

The table ``tool.hatch.build.hooks.custom`` of a distribution's ``pyproject.toml`` has

    packages    packages below the source roots of this tree; `kera` has its own in `only-include`
    adds        jar         the columnar engine of the Spark connector
                native      the native core
                commit      the commit of this tree
                deployment  files of deploy/, which `kera generate` prints

An editable install uses what is in the tree, which `make setup` and `make jar` build. There is one sdist, that of
`kera`: it has the sources of all distributions.

Native core and jar are built, not kept in git. Building the jar takes a JDK and pyspark, building the native core a C
compiler and the headers of Python. The environment variable KERA_JAR decides about the wheel of `kera-spark`:

    require  without the jar there is no wheel; an isolated build gets itself a pyspark for it
    (unset)  the same, without the pyspark: then the jar has to be there, or what builds it
    auto     where the jar is neither current nor can be built, the wheel has none, and a line says so
    skip     the wheel has no jar, and nothing is built

So nobody publishes a wheel without the jar and does not know. KERA_NATIVE_BUILD decides about the wheel of `kera`,
which works without the native core, and slower:

    require  without the native core there is no wheel
    auto     where it can be built, the wheel has it and is for this kind of machine; elsewhere a line says so
    (unset)  the same
    skip     the wheel is without, and for any machine

The commit is KERA_COMMIT, or that of the tree. A wheel that is built from the sdist has the sdist's.
"""

import importlib.util
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TREE = Path(__file__).resolve().parent
POLICIES = ("require", "auto", "skip")
JAR_PROGRAM = Path("spark_connector", "jvm", "build.py")
NATIVE_PROGRAM = Path("core", "native", "build.py")
COMMIT_OF_SDIST = "COMMIT"
COMMIT_OF_WHEEL = "kera/core/COMMIT"
GIT_TIMEOUT_S = 30
NOT_PACKAGED = ("__pycache__", "jars", "*.pyc", ".*")
"""Files and folders in packages that git ignores, too."""
DEPLOYMENT = ("docker", "grafana", "prometheus", "systemd")
"""Folders of deploy/ of which the wheel has what is for machines, by the ends of names."""
DEPLOYED = {".json", ".service", ".sysusers", ".toml", ".yaml", ".yml"}

WAY_OUT = (
    "KERA_JAR=skip builds a wheel without the Spark connector's columnar engine;"
    " KERA_JAR=require gets an isolated build its pyspark, and JAVA_HOME names a JDK"
)


class Hook(BuildHookInterface[Any]):
    """Puts into a wheel what its distribution has, and the commit into the sdist."""

    def dependencies(self) -> list[str]:
        """What an isolated build environment needs besides hatchling."""
        if os.environ.get("KERA_JAR") != "require" or "jar" not in self.config.get("adds", ()):
            return []  # not by default: this is asked for editable installs, too, which need no jar
        return [each for each in self.metadata.core.dependencies if each.startswith("pyspark")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is built before the wheel is put together."""
        if self.target_name == "sdist":
            if Path(self.root) != TREE:
                raise ValueError("the sdist of kera has the sources of this distribution: build this one with --wheel")
            add_commit(TREE, build_data, COMMIT_OF_SDIST)
        elif version != "editable":
            for package in self.config.get("packages", ()):
                add_package(TREE, build_data, package)
            for each in self.config.get("adds", ()):
                ADDITIONS[each](TREE, build_data)


def add_package(root: Path, build_data: dict[str, Any], package: str) -> None:
    """Put a package into the wheel; its source root is the first folder of `package`."""
    source_root = root / Path(package).parts[0]
    for file in sorted((root / package).rglob("*")):
        name = file.relative_to(source_root)
        if file.is_file() and not any(fnmatch(part, pattern) for part in name.parts for pattern in NOT_PACKAGED):
            build_data["force_include"][str(file)] = str(name)


def add_commit(root: Path, build_data: dict[str, Any], name: str = COMMIT_OF_WHEEL) -> None:
    """Write down of which commit this is, if anybody knows."""
    commit = os.environ.get("KERA_COMMIT") or commit_of(root)
    if commit:
        written = root / "build" / "COMMIT"
        written.parent.mkdir(exist_ok=True)
        written.write_text(commit + "\n", encoding="utf-8")
        build_data["force_include"][str(written)] = name


def add_deployment(root: Path, build_data: dict[str, Any]) -> None:
    """Put what `kera generate` prints beside it."""
    for folder in DEPLOYMENT:
        for file in sorted((root / "deploy" / folder).iterdir()):
            if file.suffix in DEPLOYED:
                build_data["force_include"][str(file)] = f"kera/cli/deploy/{folder}/{file.name}"


def commit_of(root: Path) -> str:
    """The commit of an unpacked sdist, or of a work tree; empty for neither."""
    if (root / COMMIT_OF_SDIST).is_file():
        return (root / COMMIT_OF_SDIST).read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():  # git would look in the folders above
        return ""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except OSError:  # without git nobody can say
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def add_jar(root: Path, build_data: dict[str, Any]) -> None:
    """Build the jar and put it into the wheel."""
    if policy("KERA_JAR", "require") == "skip":
        return
    program = build_program(root, JAR_PROGRAM)
    try:
        program.build()
    except program.NotPossible as error:
        if policy("KERA_JAR", "require") == "require":
            error.add_note(WAY_OUT)
            print(f"kera: error: no wheel without the jar: {error}. {WAY_OUT}", file=sys.stderr)
            raise
        print(f"kera: built without the Spark connector's columnar engine (see KERA_JAR): {error}", file=sys.stderr)
        return
    build_data["force_include"][str(program.JAR)] = f"kera/spark_connector/jars/{program.JAR.name}"


def add_native(root: Path, build_data: dict[str, Any]) -> None:
    """Build the native core and put it into the wheel, which is of this kind of machine then."""
    wanted = policy("KERA_NATIVE_BUILD", "auto")
    if wanted == "skip":
        return
    program = build_program(root, NATIVE_PROGRAM)
    try:
        program.build()
    except program.NotPossible as error:
        print(f"kera: built without the native core (see KERA_NATIVE_BUILD): {error}", file=sys.stderr)
        if wanted == "require":
            raise
        return
    build_data["force_include"][str(program.EXTENSION)] = f"kera/core/{program.EXTENSION.name}"
    build_data["pure_python"] = False
    build_data["tag"] = program.platform_tag()


ADDITIONS = {"commit": add_commit, "deployment": add_deployment, "jar": add_jar, "native": add_native}


def policy(variable: str, default: str) -> str:
    """What the variable says.

    Raises:
        ValueError: nothing that is known.
    """
    value = os.environ.get(variable) or default
    if value not in POLICIES:
        raise ValueError(f"{variable}={value}: one of {', '.join(POLICIES)}")
    return value


def build_program(root: Path, path: Path) -> ModuleType:
    """A program that builds something, imported from its file: the environment of a build has no kera."""
    spec = importlib.util.spec_from_file_location(f"kera_{path.parent.name}", root / path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program
