"""Parses the addresses of a copy's source and target, of four kinds. This module opens no connection.

    kera:clicks                              a stream of the cluster that the command uses
    kera://host:7400/clicks                  a stream of another cluster
    kafka://host:9092/clicks                 a topic; several brokers with commas
    postgresql://user@host/db?table=clicks   a table (or query=…) of PostgreSQL; other parameters are libpq's
    postgresql:…?table=clicks&changes=logical  all changes of a table
    clicks.parquet, /data/*.csv, file:///d/  files; the ending, or ``format``, gives their format

No address has a password, because all users of a host see the arguments of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from kera.core.base.spelling import closest
from kera.core.errors import InvalidArgument

FORMATS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
"""The codecs by the ending of a compressed file, which follows the ending of its format."""
SCHEMES = ("kera", "kafka", "postgresql", "postgres", "file")
NAME_CHARS_MAX = 100
_OF_CHANGES = ("values", "tombstones", "slot", "publication")
TABLE_PARAMETERS = ("table", "query", "key", "settle", "changes", *_OF_CHANGES)
"""Parameters of a PostgreSQL address; all others are libpq's."""
LIBPQ_SECRETS = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
LIBPQ_PARAMETERS = frozenset(
    {
        *("host", "hostaddr", "port", "dbname", "user", "passfile", "service", "servicefile", "options"),
        *("application_name", "fallback_application_name", "client_encoding", "connect_timeout", "replication"),
        *("channel_binding", "require_auth", "requirepeer", "target_session_attrs", "load_balance_hosts"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"),
        *("ssl", "sslmode", "sslnegotiation", "sslcompression", "sslcert", "sslkey", "sslcertmode", "sslrootcert"),
        *("sslcrl", "sslcrldir", "sslsni", "sslkeylogfile", "requiressl", "ssl_min_protocol_version"),
        *("ssl_max_protocol_version", "min_protocol_version", "max_protocol_version"),
        *("gssencmode", "gsslib", "gssdelegation", "krbsrvname"),
        *("oauth_issuer", "oauth_client_id", "oauth_scope"),
    }
)
"""Parameters of a connection, as of PostgreSQL 18, without secrets."""
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):")
_WILD = re.compile(r"[*?\[]")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A stream."""

    stream: str
    bootstrap: str = ""
    """Coordinators of the stream's cluster; empty: those of the command."""

    @property
    def shown(self) -> str:
        """A description without secrets, which is always the same."""
        return f"stream {self.stream}" + (f" at {self.bootstrap}" if self.bootstrap else "")

    @property
    def slug(self) -> str:
        """The part of a copy's default name."""
        return self.stream


@dataclass(frozen=True, slots=True)
class TopicEnd:
    """A topic of Kafka."""

    bootstrap: str
    topic: str

    @property
    def shown(self) -> str:
        """See `StreamEnd`."""
        return f"topic {self.topic}"

    @property
    def slug(self) -> str:
        """See `StreamEnd`."""
        return f"kafka.{self.topic}"


@dataclass(frozen=True, slots=True)
class TableEnd:
    """A table of PostgreSQL, or the result of a query."""

    uri: str
    """The address for libpq: without KerA's parameters, and without a password."""
    table: str = ""
    query: str = ""
    key: tuple[str, ...] = ()
    """Columns whose values ascend; empty: the primary key."""
    settle: str = ""
    """Seconds to wait for transactions that are under way; empty: the source's default."""
    changes: bool = False
    """Whether to copy all changes of the table, out of PostgreSQL's log."""
    values: str = ""
    """Form of records of changes: json or columns; empty: as the stream requires."""
    tombstones: bool = False
    """Whether a record without a value follows each deletion."""
    slot: str = ""
    """The replication slot of changes; empty: the copy makes one."""
    publication: str = ""
    """The publication that has the table; empty: the copy makes one."""

    @property
    def shown(self) -> str:
        """See `StreamEnd`."""
        table = f"changes of table {self.table}" if self.changes else f"table {self.table}"
        return table if self.table else f"query {self.query!r}"

    @property
    def slug(self) -> str:
        """See `StreamEnd`."""
        return f"postgres.{self.table or 'query'}" + (".changes" if self.changes else "")


@dataclass(frozen=True, slots=True)
class FilesEnd:
    """Files: one, those that fit a pattern, or those in a directory."""

    path: str
    format: str
    many: bool = field(default=False)
    """Whether the path is a pattern or a directory."""

    @property
    def shown(self) -> str:
        """See `StreamEnd`."""
        return f"{'files' if self.many else 'file'} {self.path}"

    @property
    def slug(self) -> str:
        """See `StreamEnd`."""
        parts = [part for part in self.path.split("/") if part and not _WILD.search(part)]
        return f"file.{parts[-1] if parts else 'all'}"


End: TypeAlias = StreamEnd | TopicEnd | TableEnd | FilesEnd


def parse_end(text: str, *, file_format: str | None = None) -> End:
    """Parse the address `text`. Raises `InvalidArgument`, which never repeats a password."""
    found = _SCHEME.match(text)
    if found is None or text.startswith("/"):
        return _files(text, file_format)
    scheme = found[1].lower()
    if scheme not in SCHEMES:
        meant = closest(scheme, SCHEMES)
        raise InvalidArgument(
            f"{scheme}: is not one of {', '.join(f'{each}:' for each in SCHEMES)}"
            + (f"; did you mean {meant}:?" if meant else "; a file with a colon in its name is written ./name")
        )
    if scheme == "file":
        if "?" in text or "#" in text:
            raise InvalidArgument(f"{text}: file: takes nothing behind '?' or '#'; in a name they are %3F and %23")
        return _files(
            unquote(_split(text, "write file:///path/of/a/file").path) or text.removeprefix("file:"), file_format
        )
    if file_format is not None:
        raise InvalidArgument(f"--format applies to files only, and not to {scheme}:", option="--format")
    if scheme == "kera":
        return _stream(text)
    return _topic(text) if scheme == "kafka" else _table(text)


def _split(text: str, way_out: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:  # its message may repeat a password
        raise InvalidArgument(f"{text.partition(':')[0]}: the host is not valid; {way_out}") from None


def _stream(text: str) -> StreamEnd:
    rest = text.partition(":")[2]
    if "?" in rest or "#" in rest:
        raise InvalidArgument(f"{text}: kera: takes nothing behind '?' or '#'; write kera:clicks")
    if not rest.startswith("//"):
        return StreamEnd(_named(rest, text, "stream", "kera:clicks"))
    hosts, _, name = rest[2:].partition("/")
    if not name:  # kera://clicks
        hosts, name = "", hosts
    _no_user(hosts, "kera")
    return StreamEnd(_named(name, text, "stream", "kera:clicks or kera://host:7400/clicks"), hosts)


def _topic(text: str) -> TopicEnd:
    hosts, _, name = text.partition(":")[2].removeprefix("//").partition("/")
    _no_user(hosts, "kafka")
    if not hosts:
        raise InvalidArgument("kafka: without brokers; write kafka://host:9092/topic")
    name, _, query = name.partition("?")
    if query:
        raise InvalidArgument(
            "kafka: takes nothing behind '?': put settings of the client into the file of --kafka-config, out of the"
            " list of processes"
        )
    servers = ",".join(host if re.search(r":\d+$", host) else f"{host}:9092" for host in hosts.split(","))
    return TopicEnd(servers, _named(unquote(name), text, "topic", "kafka://host:9092/topic"))


def _table(text: str) -> TableEnd:
    parts = _split(text, "an IPv6 address has brackets around it, as in postgresql://user@[::1]:5432/db")
    given = parse_qsl(parts.query, keep_blank_values=True)
    if parts.password is not None or any(name in LIBPQ_SECRETS for name, _ in given):
        raise InvalidArgument(
            "the address has a password in it, which everybody on this host sees among the arguments of processes: put"
            " it into ~/.pgpass, the variable PGPASSWORD, or a file that PGPASSFILE names, and leave it out here"
        )
    _check_parameters([name for name, _ in given], parts.fragment)
    ours = {name: value for name, value in given if name in TABLE_PARAMETERS}
    rest = [(name, value) for name, value in given if name not in ours]
    if len(ours.keys() & {"table", "query"}) != 1:
        raise InvalidArgument("postgresql: needs a table or a query; write postgresql://user@host/db?table=clicks")
    if not (ours.get("table") or ours.get("query")):
        raise InvalidArgument("postgresql: the table, or the query, is empty")
    key = tuple(filter(None, ours.get("key", "").split(",")))
    if "query" in ours and not key:
        raise InvalidArgument(
            "a query needs a key: columns that order its rows and are unique together: …?query=…&key=id"
        )
    settle = ours.get("settle", "")
    if settle and not re.fullmatch(r"[0-9]{1,9}", settle):
        raise InvalidArgument(f"settle={settle}: write a whole number of seconds")
    where = f"postgresql://{parts.netloc}{parts.path}"
    uri = f"{where}?{urlencode(rest, quote_via=quote)}" if rest else where
    return TableEnd(uri, ours.get("table", ""), ours.get("query", ""), key, settle, **_changes(ours))


def _changes(ours: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `TableEnd` for changes. Raises `InvalidArgument`."""
    changes = ours.get("changes")
    if changes is None:
        if more := sorted(ours.keys() & set(_OF_CHANGES)):
            raise InvalidArgument(f"{more[0]}: is about changes; write …?table=orders&changes=logical")
        return {}
    if changes != "logical":
        raise InvalidArgument(f"changes={changes}: the only way to read changes is changes=logical")
    if "query" in ours or "key" in ours:
        raise InvalidArgument(
            "changes=logical: takes a table, and its primary key: …?table=orders&changes=logical, without query or key"
        )
    if ours.get("values", "json") not in ("json", "columns"):
        raise InvalidArgument(f"values={ours['values']}: write values=json or values=columns")
    if ours.get("tombstones", "false") not in ("true", "false"):
        raise InvalidArgument(f"tombstones={ours['tombstones']}: write tombstones=true or tombstones=false")
    slot = ours.get("slot", "")
    if slot and not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
        raise InvalidArgument(f"slot={slot}: a replication slot has a name of a-z, 0-9 and _, at most 63 of them")
    return {
        "changes": True,
        "values": ours.get("values", ""),
        "tombstones": ours.get("tombstones") == "true",
        "slot": slot,
        "publication": ours.get("publication", ""),
    }


def _check_parameters(names: list[str], fragment: str) -> None:
    """Raise `InvalidArgument` for a fragment, or for a parameter that is unknown or given twice."""
    if fragment:
        raise InvalidArgument("postgresql: takes nothing behind '#'; in a name or a query it is written %23")
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"postgresql: the parameter {name} is there twice")
        if name not in TABLE_PARAMETERS and name not in LIBPQ_PARAMETERS:
            meant = closest(name, [*TABLE_PARAMETERS, *sorted(LIBPQ_PARAMETERS)])
            raise InvalidArgument(
                f"postgresql: there is no parameter {name}"
                + (f"; did you mean {meant}?" if meant else f"; there are {', '.join(TABLE_PARAMETERS)}, and libpq's")
            )


def _files(path: str, file_format: str | None) -> FilesEnd:
    if not path:
        raise InvalidArgument("an empty address; write kera:clicks, kafka://…, postgresql://… or the path of a file")
    wild = bool(_WILD.search(path))
    directory = path.endswith("/")
    name = next((path.removesuffix(codec) for codec in CODECS if path.endswith(codec)), path)
    ending = next((kind for end, kind in FORMATS.items() if name.endswith(end)), None)
    chosen = file_format or ending
    if chosen is None:
        raise InvalidArgument(
            f"{path}: --format says what files are: parquet, csv or jsonl, unless they end with {', '.join(FORMATS)};"
            " a stream is written kera:name"
        )
    if chosen not in FORMATS.values():
        raise InvalidArgument(f"--format: {chosen!r} is not one of parquet, csv, jsonl", option="--format")
    return FilesEnd(path, chosen, many=wild or directory)


def _named(name: str, text: str, what: str, example: str) -> str:
    if not name or "/" in name:
        raise InvalidArgument(f"{text}: not the name of a {what}; write {example}")
    return name


def _no_user(hosts: str, scheme: str) -> None:
    if "@" in hosts:
        raise InvalidArgument(
            f"{scheme}: takes no user or password in the address, as all users of this host see it:"
            + (" see --kafka-config" if scheme == "kafka" else " see KERA_CLIENT_USER and kera context")
        )


def copy_name(source: End, target: End) -> str:
    """Return the default name of a copy."""
    return _ODD.sub("-", f"{source.slug}-to-{target.slug}").strip("-.")[:NAME_CHARS_MAX] or "copy"


def check_copy_name(name: str) -> str:
    """Return `name`. Raises `InvalidArgument` if it is not a valid name of a copy."""
    if not name or len(name) > NAME_CHARS_MAX or _ODD.search(name):
        raise InvalidArgument(
            f"--name: {name!r} is not a copy's name: letters, digits, and . _ -, at most {NAME_CHARS_MAX} of them",
            option="--name",
        )
    return name
