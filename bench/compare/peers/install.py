"""Programs of the peers, fetched once into ``~/.cache/kera-bench``: jars, packages for Python, programs of Go and
Debian.

Nothing is installed: jars come by ``mvn``, clients by ``pip --target``, programs in Go are built by ``go install``, and
Debian's packages are unpacked, with their missing dependencies, into a folder of their own. A program on ``PATH`` is
preferred to all of them.

`Missing` names anything that could not be fetched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "kera-bench"
SECONDS_MAX = 300.0


class Missing(Exception):
    """A dependency of a peer is missing, and could not be fetched."""


@dataclass(frozen=True)
class Program:
    """A server's executable."""

    path: Path
    root: Path | None
    """The folder of Debian's unpacked packages; None: the program is the system's."""

    def environment(self) -> dict[str, str]:
        """The environment with which it finds the libraries that came with it."""
        if self.root is None:
            return {}
        triplet = sysconfig.get_config_var("MULTIARCH")
        return {"LD_LIBRARY_PATH": ":".join(str(self.root / lib / triplet) for lib in ("usr/lib", "lib"))}

    def version(self) -> str:
        """The version that it reports."""
        done = run([str(self.path), "--version"], f"{self.path.name} does not start", self.environment())
        return done.strip().splitlines()[0]


def program(command: str, package: str) -> Program:
    """`command` from ``PATH``, or else from Debian's `package`. Raises `Missing`."""
    found = shutil.which(command)
    if found is not None:
        return Program(Path(found), None)
    root = debian(package)
    for folder in ("usr/bin", "usr/sbin"):
        if (root / folder / command).exists():
            return Program(root / folder / command, root)
    raise Missing(f"there is no {command} in Debian's {package}")


def go_program(command: str, module: str, version: str) -> Program:
    """`command` from ``PATH``, or else built from the Go module `module`, which ends with the same name. Raises
    `Missing`.
    """
    found = shutil.which(command)
    if found is not None:
        return Program(Path(found), None)
    folder = CACHE / f"{command}-{version}"
    if not folder.is_dir():
        go = shutil.which("go")
        if go is None:
            raise Missing(f"there is no {command}, and no go, which builds it")
        with making(folder) as made:
            environment = {"GOBIN": str(made), "CGO_ENABLED": "0"}
            run([go, "install", f"{module}@{version}"], f"go could not build {command}", environment)
    return Program(folder / command, None)


def debian(package: str) -> Path:
    """The root of the unpacked `package`, with all its missing dependencies. Raises `Missing`."""
    root = CACHE / f"debian-{package}"
    if root.is_dir():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Missing(f"there is no {package}, and no apt-get, which brings it")
    failure = f"apt-get could not bring {package}"
    wanted = new_packages(run(["apt-get", "-s", "--no-install-recommends", "install", package], failure))
    with making(root) as made:
        run(["apt-get", "download", *wanted], failure, folder=made)
        for archive in sorted(made.glob("*.deb")):
            run(["dpkg", "-x", str(archive), str(made)], f"dpkg could not unpack {archive.name}")
            archive.unlink()
    return root


def new_packages(simulation: str) -> list[str]:
    """The names in the output of ``apt-get --simulate install``."""
    return [line.split()[1] for line in simulation.splitlines() if line.startswith("Inst ")]


def python_packages(*requirements: str) -> Path:
    """A folder for ``sys.path`` with exactly the `requirements`, ``name==version`` each. Raises `Missing`."""
    names = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = CACHE / f"{names}-py{sys.version_info[0]}{sys.version_info[1]}"
    if not folder.is_dir():
        with making(folder) as made:
            argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
            run([*argv, "--target", str(made), *requirements], f"pip could not bring {' '.join(requirements)}")
    return folder


def jars(name: str, artifacts: Sequence[str], *, alone: bool) -> Path:
    """A folder with the jars of `artifacts` and, unless `alone`, of all their dependencies."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing(f"there is no mvn, which brings {artifacts[0]}")
    with making(folder) as made:
        pom = made / "pom.xml"
        pom.write_text(_pom(artifacts, alone=alone))
        argv = [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
        run([*argv, f"-DoutputDirectory={made}"], f"mvn could not bring {artifacts[0]}")
        pom.unlink()
    return folder


def _pom(artifacts: Sequence[str], *, alone: bool) -> str:
    no_others = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = []
    for artifact in artifacts:
        group, name, version = artifact.split(":")
        head = f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        dependencies.append(f"<dependency>{head}{no_others if alone else ''}</dependency>")
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>bench</groupId><artifactId>bench</artifactId>"
        f"<version>1</version><dependencies>{''.join(dependencies)}</dependencies></project>"
    )


def java() -> str:
    """The java of ``JAVA_HOME`` or ``PATH``. Raises `Missing`."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java" if home else "java")
    if found is None:
        raise Missing('there is no java: JAVA_HOME="$(sh scripts/java.sh)" says where one is')
    return found


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it when the block succeeds: the folder is never incomplete."""
    made = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
    made.mkdir(parents=True)
    try:
        yield made
        with contextlib.suppress(OSError):  # another run was faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def run(
    argv: Sequence[str], failure: str, environment: dict[str, str] | None = None, *, folder: Path | None = None
) -> str:
    """The output of the command. Raises `Missing` with `failure` and the reason."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
            env={**os.environ, **(environment or {})},
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"{failure} within {SECONDS_MAX:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or line.startswith("E:")]
        raise Missing(f"{failure}: {lines[0] if lines else f'it ended with {done.returncode}'}"[:400])
    return done.stdout
