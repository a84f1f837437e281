"""``kera generate``: prints the files of deploy/, for users of the package who do not have the source tree.

The wheel has these files (hatch_build.py); an editable install reads them from the tree. They are printed byte for
byte, so that redirected output equals the file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import typer

from kera.cli._commands import Commands
from kera.cli._paths import expanded_path, file_to_replace, path_of
from kera.cli._run import UsageError
from kera.core.base.spelling import hint
from kera.core.errors import KeraError

app = Commands(help="Print files for a deployment: alerts, dashboard, units, completion.", no_args_is_help=True)


class Kind(NamedTuple):
    """The files of one command."""

    shown: tuple[str, ...]
    """Files that the command prints if none is named."""
    others: tuple[str, ...] = ()
    """Further files that go with these."""
    folder: str = ""
    """The folder of deploy/ with the files; empty: the names have their folders, which have to be kept."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.shown, *self.others)


PROMETHEUS = Kind(("kera.rules.yml",), ("prometheus.yml", "kera.rules.test.yml"), "prometheus")
GRAFANA = Kind(("kera.json",), (), "grafana")
SYSTEMD = Kind(
    ("kera-coordinator.service", "kera-broker.service", "kera-backup.service"),
    ("kera-connect@.service", "kera.toml", "kera.sysusers"),
    "systemd",
)
COMPOSE = Kind(
    ("docker/compose.yaml",),
    (
        "docker/compose.security.yaml",
        "docker/prometheus.yml",
        "docker/grafana.yml",
        "prometheus/kera.rules.yml",
        "grafana/kera.json",
    ),
)
KINDS = (PROMETHEUS, GRAFANA, SYSTEMD, COMPOSE)


SHELLS = ("bash", "zsh", "fish")
"""Shells with completion."""


FILE_ARGUMENT = typer.Argument(None, metavar="[FILE]", help="Name of the file to print; --list shows the names.")
LIST_OPTION = typer.Option(False, "--list", help="Only list the files that there are.")
OUT_OPTION = typer.Option(
    None, "--out", metavar="DIR", parser=path_of("--out"), help="Write all of them, or FILE, into a directory instead."
)
FORCE_OPTION = typer.Option(False, "--force", help="With --out: replace files that are there and have something else.")


@app.command()
def prometheus(
    file: str | None = FILE_ARGUMENT,
    only_list: bool = LIST_OPTION,
    out: Path | None = OUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Print recorded series and alerts for Prometheus.

    By name also the configuration that scrapes, and tests of the alerts.
    """
    _generate(PROMETHEUS, file, out, only_list=only_list, force=force)


@app.command()
def grafana(
    file: str | None = FILE_ARGUMENT,
    only_list: bool = LIST_OPTION,
    out: Path | None = OUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Print the dashboard for Grafana.

    It shows what the rules for Prometheus record.
    """
    _generate(GRAFANA, file, out, only_list=only_list, force=force)


@app.command()
def systemd(
    file: str | None = FILE_ARGUMENT,
    only_list: bool = LIST_OPTION,
    out: Path | None = OUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Print the units of systemd, each under its name.

    By name also the settings and the user that go with them.
    """
    _generate(SYSTEMD, file, out, only_list=only_list, force=force)


@app.command()
def compose(
    file: str | None = FILE_ARGUMENT,
    only_list: bool = LIST_OPTION,
    out: Path | None = OUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Print the file of Docker Compose for a cluster.

    It is one on this machine, to try it. With --out the files that it mounts come as well.
    """
    _generate(COMPOSE, file, out, only_list=only_list, force=force)


@app.command()
def completion(
    shell: str = typer.Argument(
        ..., metavar="SHELL", autocompletion=lambda: list(SHELLS), help=f"For which: {', '.join(SHELLS)}."
    ),
) -> None:
    """Print the script that completes kera in a shell.

    Load it with `source`, or put it into the shell's folder of completions.
    """
    from typer._completion_shared import get_completion_script

    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}{hint(shell, SHELLS)}")
    print(get_completion_script(prog_name="kera", complete_var="_KERA_COMPLETE", shell=shell))


def _generate(kind: Kind, file: str | None, out: Path | None, *, only_list: bool, force: bool) -> None:
    if file is not None and file not in kind.files:
        raise UsageError(f"there is no file {file!r} here{hint(file, kind.files)}")
    if only_list and (file is not None or out is not None):
        raise UsageError("--list is given alone")
    if force and out is None:
        raise UsageError("--force belongs to --out")
    if only_list:
        print(*kind.files, sep="\n")
    elif out is not None:
        _write(kind, (file,) if file else kind.files, expanded_path("--out", out), force=force)
    else:
        _print(kind, (file,) if file else kind.shown)


def _print(kind: Kind, names: tuple[str, ...]) -> None:
    """Print one file unchanged, or several under their names, as `systemctl cat` does."""
    parts = [content(kind, name) for name in names]
    if len(parts) > 1:
        parts = [f"# {name}\n".encode() + part for name, part in zip(names, parts, strict=True)]
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n".join(parts))  # bytes, so that the encoding of the output does not matter
    sys.stdout.buffer.flush()


def _write(kind: Kind, names: tuple[str, ...], out: Path, *, force: bool) -> None:
    """Write all files, or none if that would replace a file with other content and `force` is off."""
    wanted = {file_to_replace(out / name): content(kind, name) for name in names}
    try:
        changed = [str(path) for path, data in wanted.items() if path.exists() and path.read_bytes() != data]
        if changed and not force:
            raise UsageError(f"{', '.join(changed)}: there already, with something else in it; --force replaces it")
        for name in names:  # not for targets of links: a link to a missing directory is most likely a mistake
            (out / name).parent.mkdir(parents=True, exist_ok=True)
        for path, data in wanted.items():
            path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or out}: {error.strerror}") from error
    print(*(str(out / name) for name in names), sep="\n")


class NotPackaged(KeraError):
    """This installation lacks the files."""

    code = "not_packaged"


def content(kind: Kind, name: str) -> bytes:
    """Return a file of deploy/. Raises `NotPackaged` if the installation lacks it."""
    here = Path(__file__).resolve()
    tree = here.parents[3]
    folders = [here.parent / "deploy", *([tree / "deploy"] if (tree / "pyproject.toml").is_file() else [])]
    for folder in folders:
        try:
            return (folder / kind.folder / name).read_bytes()
        except OSError:
            continue
    raise NotPackaged(f"this installation of kera has no {name}: reinstall its wheel", name=name)
