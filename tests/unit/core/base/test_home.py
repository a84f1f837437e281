"""`kera.core.base.home`: home directories in paths, and the error about an unknown one in each setting with a path."""

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


def test_only_the_start_of_a_path_is_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/its/home")

    assert expanded(Path("~/data")) == Path("/its/home/data")
    assert expanded(Path("~root")).is_absolute()
    assert expanded(Path("data/~nobody/~")) == Path("data/~nobody/~")


def test_the_error_says_that_the_user_has_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")  # as in a container that runs with the id of no user

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
async def test_a_daemon_names_the_setting_with_an_unknown_home(
    tmp_path: Path, start: Callable[[Path], AbstractAsyncContextManager[dict[str, Any]]], named: str
) -> None:
    with pytest.raises(InvalidSettings) as refused:
        async with start(tmp_path / "data"):
            pass

    assert (refused.value.message, refused.value.attributes) == (f"{named}: {UNKNOWN}", {"path": str(NOBODYS)})
    assert list(tmp_path.iterdir()) == []


def test_a_data_directory_in_an_unknown_home_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=f"^data_dir: {UNKNOWN}$"):
        DataDir(NOBODYS)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (TlsFiles(ca=NOBODYS), "tls_ca"),
        (TlsFiles(cert=NOBODYS, key=Path("key")), "tls_cert"),
    ],
)
def test_certificates_name_the_setting_with_an_unknown_home(files: TlsFiles, named: str) -> None:
    with pytest.raises(InvalidTls, match=f"^{named}: {UNKNOWN}$"):
        Tls(files)


@pytest.mark.parametrize("named", ["data_dir", "log_dir"])
def test_a_local_cluster_names_the_argument_with_an_unknown_home(named: str) -> None:
    arguments: dict[str, Any] = {named: NOBODYS}
    with pytest.raises(InvalidArgument, match=f"^{named}: {UNKNOWN}$"):
        LocalCluster(**arguments)
