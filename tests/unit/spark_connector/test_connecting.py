"""Connections of queries: options name the files with credentials and never contain credentials."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import InvalidArgument
from kera.spark_connector.connection import Connection, Secret
from kera.spark_connector.options.reading import parse_read_options
from kera.spark_connector.options.writing import parse_write_options
from kera.spark_connector.portal import ca_of, settings_of
from kera.spark_connector.service.pieces import connection_as_json, connection_from_json

SERVERS = {"kera.bootstrap.servers": "h:1"}
TOKEN = "kera_0123_456789"


def reading(**options: str) -> Connection:
    return parse_read_options({**SERVERS, "subscribe": "s", **options}).connection


def writing(**options: str) -> Connection:
    return parse_write_options({**SERVERS, "stream": "s", **options}).connection


both = pytest.mark.parametrize("parse", [reading, writing])


@both
def test_credential_files_and_the_user_come_from_options(parse: Callable[..., Connection]) -> None:
    files = {"tls.ca": "ca.pem", "tls.cert": "me.pem", "tls.key": "me-key.pem"}
    found = parse(**files, user="alice", **{"Password.File": " /p "})

    assert found.files == {"tls_ca": "ca.pem", "tls_cert": "me.pem", "tls_key": "me-key.pem"}
    assert found.credentials == {"user": "alice", "password_file": "/p"}
    assert parse(**{"token.file": "/t"}).credentials == {"token_file": "/t"}


@both
@pytest.mark.parametrize(
    "name",
    [
        "password", "PASSWORD", "token", "kera.password", "Kera.Token", "kera.client.password", "user_password",
        "passwd", "auth-token", "cluster.secret", "kafka.sasl.jaas.config",
    ],
)  # fmt: skip
def test_a_secret_as_an_option_is_refused_and_not_repeated(parse: Callable[..., Connection], name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"options are shown.*name that with (password|token)\.file") as caught:
        parse(**{name: "do-not-repeat"})

    assert "do-not-repeat" not in f"{caught.value} {caught.value.attributes}"


@both
def test_a_secret_in_an_address_is_refused_and_not_repeated(parse: Callable[..., Connection]) -> None:
    with pytest.raises(InvalidArgument, match=r"servers: addresses alone, without a user") as caught:
        parse(**{"kera.bootstrap.servers": "alice:do-not-repeat@h:1"})

    assert "do-not-repeat" not in f"{caught.value} {caught.value.attributes}"


@both
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"user": "alice"}, "user and password.file go together; password.file is missing"),
        ({"password.file": "/p"}, "user and password.file go together; user is missing"),
        ({"tls.cert": "c"}, "tls.cert and tls.key go together; tls.key is missing"),
        ({"user": "alice", "password.file": "/p", "token.file": "/t"}, "token.file: names the user already"),
        ({"tls.ca": " "}, "tls.ca: is empty"),
        ({"token.lifetime": "1s"}, "token.lifetime: must be 5s at least"),
        ({"token.lifetime": "2d"}, "token.lifetime: must be 1d at most"),
        ({"token.lifetime": "soon"}, "token.lifetime: must be a number with a unit"),
    ],
)
def test_contradicting_or_invalid_credential_options_are_refused(
    parse: Callable[..., Connection], options: dict[str, str], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        parse(**options)


def test_credentials_in_options_override_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_TOKEN_FILE", "/environment")
    monkeypatch.setenv("KERA_CLIENT_TLS_CA", "/ca")

    by_options = settings_of(reading(user="alice", **{"password.file": "/p"}))
    by_environment = settings_of(reading())

    assert (by_options.user, by_options.password_file, by_options.token_file) == ("alice", Path("/p"), None)
    assert (by_environment.user, by_environment.token_file) == ("", Path("/environment"))
    assert by_options.tls_ca == by_environment.tls_ca == Path("/ca")


def test_executors_authenticate_with_the_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_USER", "somebody")
    monkeypatch.setenv("KERA_CLIENT_PASSWORD", "of the executor's host")
    driver = reading(user="alice", **{"password.file": "/p", "tls.ca": "/ca", "token.lifetime": "1h"})

    executor = driver.with_token(Secret(TOKEN))
    settings = settings_of(pickle.loads(pickle.dumps(executor)))

    assert executor.credentials == {}
    assert (settings.user, settings.password, settings.password_file, settings.token_file) == ("", None, None, None)
    assert settings.token is not None
    assert settings.token.get_secret_value() == TOKEN
    assert settings.tls_ca == Path("/ca")


def test_printing_a_secret_does_not_reveal_it() -> None:
    things: list[Any] = [Secret(TOKEN), Connection("h:1", token=Secret(TOKEN)), {"a": [Secret(TOKEN)]}]

    assert not any(TOKEN in shown for thing in things for shown in (str(thing), repr(thing), f"{thing}"))
    assert Secret(TOKEN) == Secret(TOKEN)
    assert Secret(TOKEN) != Secret("another")


def test_executors_trust_the_drivers_authorities_unless_they_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_TLS_CA", "/driver")
    driver = reading(user="alice", **{"password.file": "/p"})
    executors = [
        driver.with_token(Secret(TOKEN), ca_of(settings_of(driver))),
        connection_from_json({"connection": connection_as_json(driver), "token": TOKEN}),
    ]

    monkeypatch.delenv("KERA_CLIENT_TLS_CA")
    assert [settings_of(executor).tls_ca for executor in executors] == [Path("/driver")] * 2
    monkeypatch.setenv("KERA_CLIENT_TLS_CA", "/executor")
    assert [settings_of(executor).tls_ca for executor in executors] == [Path("/executor")] * 2
    named = reading(user="alice", **{"password.file": "/p", "tls.ca": "/named"}).with_token(Secret(TOKEN), "/driver")
    assert settings_of(named).tls_ca == Path("/named")
