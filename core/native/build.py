"""Builds the extension ``kera.core._native`` from the C sources beside this file, into the tree.

    python core/native/build.py              build it, unless it is current
    python core/native/build.py --auto       the same; without a compiler a line says so, and that is not a failure
    python core/native/build.py --check      exit with 1 unless it is current
    python core/native/build.py --sanitize   build it with the sanitizers of the compiler (make test-native-asan)

It needs a C compiler (of CC, or the one that Python was built with) and the headers of the Python that runs it. What it
promises: the extension is replaced as a whole or not at all, runs with each Python from 3.11 on, and says what it was
made of, so that building again does nothing. It imports the standard library only, because it runs before kera is
installed (hatch_build.py).
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXTENSION = HERE.parent / "kera" / "core" / "_native.abi3.so"
MARK = b"kera-native-sources:"
OPTIONS = [
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror=implicit-function-declaration",
]
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-Werror",
]
TO_INSTALL = "gcc and the headers of Python (Debian: apt install gcc python3-dev)"


class NativeError(Exception):
    """The extension cannot be built. Its text is for the user: a line, or what the compiler said."""


class NotPossible(NativeError):
    """Something that building needs is not installed."""


def build(*, sanitize: bool = False) -> bool:
    """Make the extension current; whether anything had to be done.

    Raises:
        NotPossible: there is no compiler, or there are no headers of Python.
        NativeError: the compiler finds errors; these are its words.
    """
    digest = sources_digest(sanitize=sanitize)
    if made_of() == digest:
        return False
    options = OPTIONS + (SANITIZERS if sanitize else [])
    command = [*compiler(), *options, f'-DSOURCES="{digest}"', f"-I{headers()}", *map(str, sorted(HERE.glob("*.c")))]
    with tempfile.TemporaryDirectory(dir=EXTENSION.parent, prefix=".native-") as folder:
        unfinished = Path(folder) / EXTENSION.name
        compiled = subprocess.run(
            [*command, "-o", str(unfinished)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if compiled.returncode:
            raise NativeError(compiled.stdout.strip() or f"{command[0]} ended with {compiled.returncode}")
        unfinished.replace(EXTENSION)
    return True


def made_of() -> str | None:
    """The digest of what the extension in the tree was made of; None when there is none."""
    try:
        _, mark, rest = EXTENSION.read_bytes().partition(MARK)
    except FileNotFoundError:
        return None
    return rest[: rest.index(b"\0")].decode("ascii", "replace") if mark else None


def sources_digest(*, sanitize: bool = False) -> str:
    """What the extension is a function of, besides the compiler: sources and this program."""
    digest = hashlib.blake2b(digest_size=16, key=b"sanitize" if sanitize else b"")
    for path in sorted([*HERE.glob("*.[ch]"), Path(__file__)]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        NotPossible: there is none.
    """
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    raise NotPossible(f"no C compiler: install {TO_INSTALL}")


def headers() -> Path:
    """The folder of Python's headers.

    Raises:
        NotPossible: they are not installed.
    """
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise NotPossible(f"no Python.h in {folder}: install {TO_INSTALL}")
    return folder


def platform_tag() -> str:
    """The tag of a wheel that has the extension."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"cp311-abi3-{platform}"


def main() -> int:
    """Build or check as the command line says; the exit status."""
    parser = argparse.ArgumentParser(description="Build the extension of kera.core, unless it is current.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    parser.add_argument("--auto", action="store_true", help="skip the native core if the compiler is missing")
    parser.add_argument("--sanitize", action="store_true", help="with the sanitizers of the compiler")
    arguments = parser.parse_args()
    if arguments.check:
        current = made_of() == sources_digest(sanitize=arguments.sanitize)
        if not current:
            print(f"native: {EXTENSION} is not current", file=sys.stderr)
        return int(not current)
    try:
        if build(sanitize=arguments.sanitize):
            print(f"native: built {EXTENSION}")
    except NotPossible as error:
        print(f"native: KerA runs without its native core, which is slower: {error}", file=sys.stderr)
        return int(not arguments.auto)
    except NativeError as error:
        print(f"native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
