"""Builds the columnar engine of the Spark connector: the Java sources below ``src``, compiled against Spark, as a jar.

    python spark_connector/jvm/build.py           build the jar, unless it is current
    python spark_connector/jvm/build.py --check   exit with 1 unless it is

It needs a JDK and the pyspark of the Python that runs it, whose jars are all that the sources are compiled against.
What it promises: the jar is replaced as a whole or not at all; the same sources, version and compiler give the same
bytes; and the jar says what it was made of (``Kera-Sources`` and ``Kera-Spark`` in its manifest), so that building
again does nothing. It imports the standard library only, because it runs before kera is installed (hatch_build.py).
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JAVA = HERE / "src" / "main" / "java"
RESOURCES = HERE / "src" / "main" / "resources"
JAR = HERE.parent / "kera" / "spark_connector" / "jars" / "kera-spark-connector.jar"

JAVA_VERSION = 17  # the oldest that Spark 4 runs on, and so what the classes are for
JVM_FOLDER = Path("/usr/lib/jvm")
MANIFEST = "META-INF/MANIFEST.MF"
# All warnings but those that no source of ours can avoid or means to:
#   path       Spark's jars name jars that pyspark does not have
#   classfile  Arrow's classes have annotations of a checker that is not there either
#   serial     what is serialized travels within one consumer group, all of whose processes have the same jar
WARNINGS = "-Xlint:all,-path,-classfile,-serial"


class JarError(Exception):
    """The jar cannot be built. Its text is for the user: a line, or what the compiler said."""


class NotPossible(JarError):
    """Something that building needs is not installed: a compiler, or Spark."""


def build() -> bool:
    """Make the jar current; whether anything had to be done.

    Raises:
        NotPossible: there is no JDK, or no pyspark.
        JarError: the compiler finds errors; these are its words.
    """
    if outdated() is None:
        return False
    spark = spark_jars()
    version, javac = find_javac()
    # Newer compilers have warnings that this one cannot be told to leave out: they do not stop the build.
    warnings = [WARNINGS, "-Werror"] if version == JAVA_VERSION else []
    with tempfile.TemporaryDirectory(prefix="kera-jar-") as folder:
        classes = Path(folder)
        compile_sources(javac, warnings, spark, classes)
        write_jar(classes, spark)
    return True


def outdated() -> str | None:
    """Why the jar has to be built (again), in a few words; None when it is current."""
    try:
        with ZipFile(JAR) as archive:
            text = archive.read(MANIFEST).decode()
    except FileNotFoundError:
        return "it was never built"
    except (BadZipFile, KeyError, UnicodeDecodeError):
        return "it cannot be read"
    made_of = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    if made_of.get("Kera-Sources") != sources_digest():
        return "the sources changed"
    try:
        version = spark_version(spark_jars())
    except NotPossible:
        return None  # without a Spark there is none that it would not fit
    return None if made_of.get("Kera-Spark") == version else f"it was built for another Spark than {version}"


def sources_digest() -> str:
    """What the jar is a function of, besides the compiler and Spark: sources, this program, the version."""
    digest = hashlib.blake2b(digest_size=16)
    paths = [Path(__file__).resolve(), *files_of(JAVA), *files_of(RESOURCES)]
    contents = {"version": project_version().encode()} | {
        str(path.relative_to(HERE)): path.read_bytes() for path in paths
    }
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def project_version() -> str:
    """The version in pyproject.toml."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def files_of(folder: Path) -> list[Path]:
    """All files below `folder`, in an order that no file system decides."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def spark_jars() -> Path:
    """The folder of the installed pyspark's jars, found without importing it.

    Raises:
        NotPossible: there is no pyspark, or one without jars.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise NotPossible(f"no pyspark in {sys.prefix}: install kera[spark] there")
    jars = Path(spec.submodule_search_locations[0]) / "jars"
    if not any(jars.glob("spark-sql_*.jar")):
        raise NotPossible(f"no jars of Spark in {jars}: is this the pyspark-client package? install pyspark")
    return jars


def spark_version(jars: Path) -> str:
    """The version of Spark, from the name of its jar (``spark-sql_2.13-4.3.0.jar``)."""
    return min(jars.glob("spark-sql_*.jar")).stem.partition("-")[2].partition("-")[2]


def find_javac() -> tuple[int, Path]:
    """A Java compiler that is new enough, after its version: of JAVA_HOME, of PATH, or the oldest such in /usr/lib/jvm.

    Raises:
        NotPossible: there is none.
    """
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("javac")
    chosen = [Path(home, "bin", "javac")] if home else []
    if on_path:
        chosen.append(Path(on_path))
    for javac in chosen:
        version = javac_version(javac)
        if version >= JAVA_VERSION:
            return version, javac
    installed = sorted((javac_version(javac), javac) for javac in JVM_FOLDER.glob("*/bin/javac"))
    for version, javac in installed:
        if version >= JAVA_VERSION:
            return version, javac
    raise NotPossible(f"no javac {JAVA_VERSION} or newer: install openjdk-17-jdk-headless or set JAVA_HOME")


def javac_version(javac: Path) -> int:
    """The major version of a compiler (``javac 17.0.12``); 0 when it does not run."""
    try:
        asked = subprocess.run([javac, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    found = re.search(r"^javac (\d+)", asked.stdout, re.MULTILINE)
    return int(found[1]) if found else 0


def compile_sources(javac: Path, warnings: list[str], spark: Path, classes: Path) -> None:
    """Compile all sources into the folder `classes`.

    Raises:
        JarError: the compiler finds something.
    """
    sources = [path for path in files_of(JAVA) if path.suffix == ".java"]
    if not sources:
        raise JarError(f"no Java sources in {JAVA}")
    options = ["--release", str(JAVA_VERSION), "-encoding", "UTF-8", "-proc:none", *warnings]
    command: list[str | Path] = [javac, *options, "-cp", spark / "*", "-d", classes, *sources]
    compiled = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if compiled.returncode:
        raise JarError(compiled.stdout.strip() or f"{javac} ended with {compiled.returncode}")


def write_jar(classes: Path, spark: Path) -> None:
    """Put the classes and the resources into the jar, which is replaced in one step."""
    manifest = {
        "Manifest-Version": "1.0",
        "Implementation-Title": "kera-spark-connector",
        "Implementation-Version": project_version(),
        "Kera-Sources": sources_digest(),
        "Kera-Spark": spark_version(spark),
    }
    lines = [f"{name}: {value}\n" for name, value in manifest.items()]
    entries = {str(path.relative_to(folder)): path for folder in (classes, RESOURCES) for path in files_of(folder)}
    JAR.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=JAR.parent, prefix=".") as folder:
        unfinished = Path(folder) / JAR.name
        with ZipFile(unfinished, "w") as archive:
            add(archive, MANIFEST, "".join(lines).encode())  # first, where tools look for it
            for name in sorted(entries):
                add(archive, name, entries[name].read_bytes())
        unfinished.replace(JAR)


def add(archive: ZipFile, name: str, content: bytes) -> None:
    """Add an entry that does not say when and by whom it was made."""
    entry = ZipInfo(name)  # its time is 1980, the first that the format knows
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


def main() -> int:
    """Build or check as the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        description="Build the columnar engine of the Spark connector, unless it is current."
    )
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    if parser.parse_args().check:
        reason = outdated()
        if reason:
            print(f"jar: {JAR} is not current: {reason}", file=sys.stderr)
        return int(reason is not None)
    try:
        if build():
            print(f"jar: built {JAR}")
    except JarError as error:
        print(f"jar: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
