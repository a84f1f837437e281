"""`kera.core.base.home`: home directories in paths, and that one that nobody has is told wherever a path is taken."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kera.backup.application import serve as backup
from kera.backup.settings import BackupSettings
from kera.broker.application import serve as broker
from kera.broker.settings import BrokerSettings
from kera.coordinator.application import serve as coordinator
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.data_dir import DataDir
from kera.core.base.home import expanded
from kera.core.base.settings import InvalidSettings
from kera.core.errors import InvalidArgument
from kera.core.security import InvalidTls, Tls, TlsFiles
from kera.local.cluster import LocalCluster

NOBODYS = Path("~kera-nobody/data")
UNKNOWN = f"{NOBODYS} cannot be used: no user kera-nobody with a home directory is known"
COORDINATOR = "127.0.0.1:1"


def test_only_what_a_path_begins_with_is_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/its/home")

    assert expanded(Path("~/data")) == Path("/its/home/data")
    assert expanded(Path("~root")).is_absolute()
    assert expanded(Path("data/~nobody/~")) == Path("data/~nobody/~")


def test_a_user_without_a_home_directory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")  # as in a container that runs with a number that no user has

    with pytest.raises(InvalidArgument, match=r"^~/data cannot be used: this user has no home directory$"):
        expanded(Path("~/data"))


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (lambda _: coordinator(CoordinatorSettings(data_dir=NOBODYS)), "data_dir"),
        (lambda _: broker(BrokerSettings(data_dir=NOBODYS, coordinator=COORDINATOR)), "data_dir"),
        (lambda _: backup(BackupSettings(data_dir=NOBODYS, coordinator=COORDINATOR)), "data_dir"),
        (lambda path: backup(BackupSettings(data_dir=path, log_dirs=[NOBODYS], coordinator=COORDINATOR)), "log_dirs"),
    ],
    ids=["coordinator", "broker", "backup", "disk of a backup"],
)
async def test_a_daemon_names_the_setting(
    tmp_path: Path, start: Callable[[Path], AbstractAsyncContextManager[dict[str, Any]]], named: str
) -> None:
    with pytest.raises(InvalidSettings) as refused:
        async with start(tmp_path / "data"):
            pass

    assert (refused.value.message, refused.value.attributes) == (f"{named}: {UNKNOWN}", {"path": str(NOBODYS)})
    assert list(tmp_path.iterdir()) == []


def test_metadata_are_not_restored_to_a_directory_of_nobody() -> None:
    with pytest.raises(InvalidSettings, match=f"^data_dir: {UNKNOWN}$"):
        DataDir(NOBODYS)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (TlsFiles(ca=NOBODYS), "tls_ca"),
        (TlsFiles(cert=NOBODYS, key=Path("key")), "tls_cert"),
    ],
)
def test_certificates_name_their_setting(files: TlsFiles, named: str) -> None:
    with pytest.raises(InvalidTls, match=f"^{named}: {UNKNOWN}$"):
        Tls(files)


@pytest.mark.parametrize("named", ["data_dir", "log_dir"])
def test_a_local_cluster_names_what_it_was_given(named: str) -> None:
    arguments: dict[str, Any] = {named: NOBODYS}
    with pytest.raises(InvalidArgument, match=f"^{named}: {UNKNOWN}$"):
        LocalCluster(**arguments)
