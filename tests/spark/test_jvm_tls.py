"""The JVM over TLS with client certificates: it reads, and refuses untrusted certificates.

The readers are the real ones, and so is the broker; there is no Spark. ``test_jvm_access`` writes over TLS.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from kera.core.base.settings import KIB, MIB
from kera.core.security.issuing import Authority, Issued
from kera.local.cluster import LocalCluster, RunningCluster
from tests.spark.jvm_harness import threads
from tests.spark.support import Kera
from tests.spark.test_jvm_reading import SETTINGS, Jvm, as_read, fill, piece_of

HOST = "127.0.0.1"


class Certificates:
    """The certificates for a broker that requires client certificates."""

    def __init__(self, directory: Path) -> None:
        self.authority, _ = Authority.open_or_make(directory)
        self.broker = self.authority.issue(HOST)
        self.alice = self.authority.issue("alice", client=True)

    def of(self, one: Issued | None, **other: Path) -> dict[str, str]:
        """The files in the form of the service; `other` replaces some."""
        files = {
            "ca": self.authority.path,
            "cert": one.cert if one else "",
            "key": one.key if one else "",
        }
        return {name: str(path) for name, path in {**files, **other}.items()}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(certificates: Certificates) -> Iterator[RunningCluster]:
    files = {
        "tls_ca": certificates.authority.path,
        "tls_cert": certificates.broker.cert,
        "tls_key": certificates.broker.key,
    }
    with LocalCluster.running(
        arena_bytes=64 * MIB,
        segment_bytes=4 * MIB,
        coordinator_settings=files,
        broker_settings={**files, "tls_client_auth": "required"},
    ) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _environment(certificates: Certificates) -> Iterator[None]:
    """Certificates for the Python clients, also for those in the JVM's services."""
    with pytest.MonkeyPatch.context() as patch:
        for name, path in certificates.of(certificates.alice).items():
            patch.setenv(f"KERA_CLIENT_TLS_{name.upper()}", path)
        patch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "1000")
        yield


@pytest.fixture
def kera(cluster: RunningCluster) -> Kera:
    return Kera(cast("SparkSession", None), cluster.bootstrap)


@pytest.fixture(scope="module")
def reading(_environment: None) -> Iterator[Jvm]:
    with threads("kera.spark.read.Reading") as process:
        yield Jvm(process)


def over_tcp(kera: Kera, stream: str, tls: dict[str, str] | None, size: int = 512 * KIB) -> tuple[Any, Any]:
    """Make a stream; return its chunks, and a piece with them that goes over the network."""
    chunks = fill(kera, stream, size)
    how: dict[str, Any] = {"shared_memory": "never", "transport": "tcp"}
    made = piece_of(kera, stream, chunks, **how)
    made["settings"] = {**SETTINGS, "transport": "tcp", "tls": tls}
    return chunks, made


def test_chunks_are_read_over_tls_as_in_python(reading: Jvm, kera: Kera, certificates: Certificates) -> None:
    chunks, piece = over_tcp(kera, "read", certificates.of(certificates.alice), 4 * MIB)
    reader = reading.open(piece)
    assert reader.next().chunks == as_read(chunks)
    reader.close()


def other_authority(certificates: Certificates, folder: Path) -> dict[str, str]:
    stranger, _ = Authority.open_or_make(folder)
    return certificates.of(certificates.alice, ca=stranger.path)


def none_of_its_own(certificates: Certificates, _: Path) -> dict[str, str]:
    return certificates.of(None)


def no_tls(_: Certificates, __: Path) -> None:
    return None


def absent(certificates: Certificates, folder: Path) -> dict[str, str]:
    return certificates.of(certificates.alice, ca=folder / "nowhere.pem")


def no_authorities(certificates: Certificates, folder: Path) -> dict[str, str]:
    (folder / "empty.pem").write_text("# none yet\n")
    return certificates.of(certificates.alice, ca=folder / "empty.pem")


def older_form(certificates: Certificates, folder: Path) -> dict[str, str]:
    key = folder / "key.pem"
    subprocess.run(["openssl", "ec", "-in", certificates.alice.key, "-out", key], check=True, capture_output=True)
    return certificates.of(certificates.alice, key=key)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (other_authority, "its certificate is not accepted: .*unable to find valid certification path"),
        pytest.param(none_of_its_own, "was lost", marks=pytest.mark.slow),
        pytest.param(no_tls, "was lost", marks=pytest.mark.slow),
        pytest.param(absent, "tls_ca .*nowhere.pem cannot be read on this host", marks=pytest.mark.slow),
        pytest.param(
            no_authorities, "tls_ca .*empty.pem.* cannot be used: No certificate data found", marks=pytest.mark.slow
        ),
        pytest.param(
            older_form, r"Java takes keys in PKCS#8 only.*openssl pkcs8 -topk8 -nocrypt", marks=pytest.mark.slow
        ),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_error_of_a_failed_tls_connection_names_the_cause(
    reading: Jvm, kera: Kera, certificates: Certificates, tmp_path: Path, how: Any, text: str
) -> None:
    stream = how.__name__.replace("_", "-")
    _, piece = over_tcp(kera, stream, how(certificates, tmp_path), 16 * KIB)
    piece["settings"] = {**piece["settings"], "request_timeout_ms": 1000, "connect_timeout_ms": 1000}
    reader = reading.open(piece)
    with pytest.raises(RuntimeError, match=text):
        reader.next()
    reader.close()
