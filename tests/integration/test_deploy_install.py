"""deploy/hosts/install.sh installs exactly the dependencies that its wheel was tested with, or nothing."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test makes an environment

SCRIPT = Path(__file__).parents[2] / "deploy" / "hosts" / "install.sh"
TIMEOUT_S = 100.0
PROGRAM = """
def main():
    import kera_build, part
    print("kera 0.1.0 with part", part.VERSION, "in", kera_build.BUILD)
"""


def wheel_of(folder: Path, name: str, version: str, files: dict[str, str], metadata: str = "") -> Path:
    """A wheel with these files that pip accepts."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for each, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(each, text)
    return path


def kera_wheel(folder: Path, constraints: str | None) -> Path:
    """A package `kera` whose extra `server` needs `kera-server`, and that package; with constraints as the real one
    has.
    """
    files = {} if constraints is None else {"kera-0.1.0.data/data/share/kera/constraints.txt": constraints}
    extras = "".join(f"Provides-Extra: {each}\n" for each in ("server", "cli"))
    server_wheel(folder, "the first build")
    server_wheel(folder, "another version", "0.0.9")
    return wheel_of(folder, "kera", "0.1.0", files, f"{extras}Requires-Dist: kera-server==0.1.0; extra == 'server'\n")


def server_wheel(folder: Path, build: str, version: str = "0.1.0") -> Path:
    """A package `kera-server` with the program, which needs `part`."""
    needs = f"Requires-Dist: kera=={version}\nRequires-Dist: part>=1\n"
    return wheel_of(folder, "kera_server", version, program(f"kera_server-{version}", build), needs)


def program(package: str, build: str) -> dict[str, str]:
    """The files of the program `kera` in a package."""
    return {
        "kera_program.py": PROGRAM,
        "kera_build.py": f"BUILD = {build!r}\n",
        f"{package}.dist-info/entry_points.txt": "[console_scripts]\nkera = kera_program:main\n",
    }


def install(wheel: Path | str, index: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script below `root`, with the packages of a folder as the index."""
    arguments = ["--insecure", "--address", "10.0.0.1", "--coordinator", "10.0.0.1:7400", "broker"]
    return subprocess.run(
        [SCRIPT, "--root", root, "--wheel", wheel, *arguments],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with two versions of `part`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("1.0", "2.0"):
        wheel_of(folder, "part", version, {"part.py": f"VERSION = '{version}'\n"})
    return folder


def test_the_script_installs_the_versions_that_the_wheel_pins(tmp_path: Path, index: Path) -> None:
    kera_wheel(index, "# pinned\npart==1.0\n")  # 2.0 exists, and is newer

    done = install("kera==0.1.0", index, tmp_path / "root")

    assert done.returncode == 0, done.stderr
    assert "this is kera 0.1.0 with part 1.0 in the first build" in done.stdout
    assert (tmp_path / "root/etc/systemd/system/kera-connect@.service").is_file()


def test_the_script_installs_the_wheels_beside_the_given_one_and_replaces_them(tmp_path: Path, index: Path) -> None:
    wheel = kera_wheel(tmp_path, "part==1.0\n")
    server_wheel(index, "the index")
    assert "in the first build" in install(wheel, index, tmp_path / "root").stdout
    server_wheel(tmp_path, "the second build")

    done = install(wheel, index, tmp_path / "root")

    assert "this is kera 0.1.0 with part 1.0 in the second build" in done.stdout, done.stderr


def test_the_script_replaces_an_earlier_single_wheel_of_the_same_version(tmp_path: Path, index: Path) -> None:
    (tmp_path / "earlier").mkdir()
    files = program("kera-0.1.0", "one wheel") | {"kera-0.1.0.data/data/share/kera/constraints.txt": "part==1.0\n"}
    earlier = wheel_of(tmp_path / "earlier", "kera", "0.1.0", files, "Requires-Dist: part>=1\n")
    assert "in one wheel" in install(earlier, index, tmp_path / "root").stdout

    done = install(kera_wheel(tmp_path, "part==1.0\n"), index, tmp_path / "root")

    assert "this is kera 0.1.0 with part 1.0 in the first build" in done.stdout, done.stderr


def test_the_script_takes_no_other_kera_wheel_from_the_index_for_a_wheel_file(tmp_path: Path, index: Path) -> None:
    wheel = kera_wheel(tmp_path, "part==1.0\n")
    server_wheel(index, "the index")
    missing = tmp_path / "kera_server-0.1.0-py3-none-any.whl"
    missing.unlink()

    done = install(wheel, index, tmp_path / "root")

    assert done.returncode == 2
    assert str(missing) in done.stderr
    assert "nothing was installed" in done.stderr
    assert not (tmp_path / "root/opt/kera/bin/kera").exists()


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (None, "has no constraints.txt: build it with make dist"),
        ("other==1.0\n", "does not pin part==2.0"),
        ("part==3.0\n", "the pinned dependencies of"),
    ],
    ids=["no constraints", "one that is not pinned", "one that is not to be had"],
)
def test_the_script_refuses_a_wheel_that_it_cannot_install_as_pinned(
    constraints: str | None, says: str, tmp_path: Path, index: Path
) -> None:
    done = install(kera_wheel(tmp_path, constraints), index, tmp_path / "root")

    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "root/opt/kera/bin/kera").exists()
    assert not (tmp_path / "root/etc/kera").exists()
