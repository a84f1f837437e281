"""Every option of every command has an effect, or is refused.

`EFFECTS` has a line for each command with a value for each of its options. Each command runs with the option and
without; the effects have to differ. Effects are the coroutines for the event loop, the output and the written files,
and, if the command itself is asynchronous, its requests to a client: no test needs a cluster. The linter finds
functions that do not use their arguments.

A new option of a command has no value here yet, and fails `test_every_option_is_in_the_table`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import kera.cli.daemons
import kera.core.errors
from kera.backup.settings import BackupSettings
from kera.broker.settings import BrokerSettings
from kera.cli import generate
from kera.cli._run import command_of, run_app
from kera.cli.app import app
from kera.cli.bench._settings import SETTINGS
from kera.coordinator.settings import CoordinatorSettings
from kera.core.base.settings import KeraSettings
from tests.unit.cli.anything import Anything, run_with_anything

Effect = Callable[[list[str]], tuple[int, str]]

EFFECTS = r"""
node --data-dir a | --data-dir b | --coordinator h:1 | --per numa | --cpus 0 | --brokers 3 | --port 7001
  | --metrics-port 7100 | --log-dir l
dev | --brokers 2 | --backups 2 | --coordinators 2 + --zookeeper z:1 | --zookeeper z:1 | --replication 1 + --backups 2
  | --data-dir a | --port 7001 | --host 127.0.0.2 | --insecure + --host 0.0.0.0 | --arena-bytes 1GiB
  | --backup-memory-bytes 1GiB + --backups 1 | --segment-bytes 16MiB | --log-dir l
doctor | --data-dir a | --arena-bytes 1GiB | --port 7001 | --tls-cert cert | --tls-key key + --tls-cert cert
  | --tls-ca ca + --tls-cert cert | --name n + --tls-cert cert | --cluster-secret-file secret | --config kera.toml
top --once | --interval 3 | --filter x | --rows 5 | --internal | --once
top | --interval 3 | --filter x | --view groups | --internal
produce s | --key-separator : | --header a=b | --durability persisted | --latency-target 5ms
  | --partitioner murmur2_random
consume s | --from latest | --since 2h | --offset 7 | --last 7 | --streamlet 1 | --group g | --count 3 | --until-end
  | --format %k | --raw | --corrupt-chunks skip | --skip-lost | --ordered
  | --epoch 1s + --ordered
console | --listen 127.0.0.1:1 | --admin | --host n | --tls-cert cert + --tls-key key | --tls-key key + --tls-cert cert
  | --insecure + --listen 0.0.0.0:7480
check --seed 1 | --minutes 2 | --seconds 9 | --kill true | --kill-every 5 + --kill true | --stream s | --streamlets 7
  | --entries 2 | --replication 1 | --durability leader | --producers 3 | --readers 3 | --members 3 | --rate 7
  | --record-bytes 99 | --within 5 | --seed 2 | --keep
verify broker
inspect broker | --stream 7 | --chunks
stream create s | --streamlets 7 | --brokers 2 | --entries 2 | --group-segments 3 | --replication 1 | --virtual-logs 2
  | --memory-priority 1 | --replication-priority 1 | --memory-domain d | --epoch 1s | --punctuation producers
  | --epoch-grace 9s | --timestamp-ahead-max 1s | --durability leader | --codec zstd | --column a:int64
  | --schema columns.arrow
  | --key-column a + --column a:int64 | --timestamp-column t + --column "t:timestamp[us, UTC]" | --retention-ms 7
  | --retention-bytes 1GiB | --retention-consumer-group g | --retention-consumed
stream list | --internal
stream describe s
stream alter s --durability leader | --durability persisted | --virtual-logs 2 | --memory-priority 1
  | --replication-priority 1 | --memory-domain d | --epoch 1s | --punctuation producers | --epoch-grace 9s
  | --timestamp-ahead-max 1s | --retention-ms 7 | --retention-bytes 1GiB | --retention-consumer-group g
  | --no-retention-consumer-groups | --retention-consumed | --brokers 2 | --add-column a:int64
stream truncate s --all --yes | --streamlet 1 + --to 1/0+64 - --all | --entry 1 + --streamlet 1 --to 1/0+64 - --all
  | --to 1/0+64 + --streamlet 1 - --all | --all | --yes
stream delete s --yes | --yes
epochs list s | --epoch 1s | --from 7 | --limit 7 | --digest
epochs lag s
epochs punctuate s | --time 2h | --durability leader
schema register x s.proto | --type json | --message M | --proto-path .
schema check x s.proto | --type json | --message M | --proto-path .
schema list
schema versions x
schema show x | --version 2 | --id 7 - x
schema compatibility | --default full
schema delete x --yes | --version 2 | --yes
context set c --bootstrap h:1 | --user u + --password-file password | --password-file password + --user u
  | --token-file token | --tls-ca ca | --tls-cert cert + --tls-key key --tls-ca ca
  | --tls-key key + --tls-cert cert --tls-ca ca | --bootstrap h:2
context use | --none
context list
context show far
context delete far
cluster describe
cluster health
cluster move s 0 1
cluster rebalance | --dry-run
cluster drain broker-1 | --undo | --wait
cluster forget broker-1 | --force
cluster adopt s | --name n
cluster backup f
cluster restore f | --data-dir a | --zookeeper z:1 | --force + --data-dir a
cluster recoveries
group list | --internal
group describe g
group reset g s --to latest --yes | --to earliest | --to-offset 7 - --to latest | --shift-by 7 - --to latest
  | --streamlet 1 | --all-streams - s | --create | --dry-run | --force | --yes
group import g s --from kafka://h/t --yes | --from kafka://h/u | --kafka-group k | --kafka-config k.properties
  | --copy c
  | --wait 5s | --dry-run | --force | --yes
group delete g --yes | --idle 7d - g | --dry-run + --idle 7d - g | --yes
latency create c --path s --limit 1s | --path t | --limit 2s | --window 9s | --p99
latency alter c --limit 1s | --path t | --limit 2s | --window 9s | --p99 | --mean
latency list
latency delete c --yes | --yes
latency describe c | --watch | --interval 9s + --watch
connect list
connect forget c --yes | --yes
user create u --password-file password | --role admin | --password-file other | --no-password - --password-file password
  | --cluster-secret-file secret
user list | --cluster-secret-file secret
user passwd u --password-file password | --password-file other | --no-password - --password-file password
  | --cluster-secret-file secret
user roles u --role admin | --role other | --no-roles - --role admin | --cluster-secret-file secret
user delete u --yes | --yes | --cluster-secret-file secret
acl grant user:u read stream:s | --deny | --cluster-secret-file secret
acl revoke user:u read stream:s | --rule 7 - user:u read stream:s | --deny | --cluster-secret-file secret
acl list | --principal user:u | --resource stream:s | --cluster-secret-file secret
acl check read stream:s | --principal user:u | --cluster-secret-file secret
token issue --stream s | --stream t | --group g | --resource stream:x | --lifetime 2h | --out new
token list | --cluster-secret-file secret
token renew 12345678 | --cluster-secret-file secret
token revoke 12345678 | --cluster-secret-file secret
quota set u --streams 1 | --default - u | --bytes-in-per-s 1MiB | --bytes-out-per-s 1MiB | --requests-per-s 7
  | --connections 7 | --streams 7 | --stored-bytes 1GiB | --cluster-secret-file secret
quota show u | --default - u | --cluster-secret-file secret
quota clear u | --default - u | --cluster-secret-file secret
tls init made | --client c | --days 7
generate prometheus | --list | --out made | --force + --out changed
generate grafana | --list | --out made | --force + --out changed
generate systemd | --list | --out made | --force + --out changed
generate compose | --list | --out made | --force + --out changed
generate completion bash
"""
"""A command that works; after each bar an option, after a plus the words that both runs need with it, and after a minus
the words that must be absent from both."""

REFUSED = r"""
top --json --filter x: --filter has no effect on JSON
top --json --rows 3: --rows has no effect on JSON
top --once --view groups: --view has no effect on a snapshot
top --json --once --view groups: --view has no effect on a snapshot
top --rows 3: --rows needs --once
doctor -b h:1 --port 7001: --port is about this machine
doctor -b h:1 --tls-cert cert: --tls-cert is about this machine
dev --insecure: --insecure has no effect at 127.0.0.1
console --listen [::1]:7480 --insecure: --insecure has no effect at ::1
dev --backup-memory-bytes 1GiB: --backup-memory-bytes needs --backups
bench produce --bootstrap h:1 --brokers 2: brokers is for a temporary cluster
bench e2e --bootstrap h:1 --arena-bytes 1GiB: arena_bytes is for a temporary cluster
bench consume --backup-memory-bytes 1GiB: backup_memory_bytes needs backups
schema register x s.avsc --message M: --message is for Protobuf
schema check x s.avsc --proto-path .: --proto-path is for Protobuf
schema check x s.binpb --proto-path .: --proto-path is for a .proto file
consume s --json --format %s: --json and --format are mutually exclusive
consume s --epoch 1s: --epoch goes with --ordered
consume s --skip-lost --ordered: --skip-lost does not go with --ordered
consume s --streamlet 0 --ordered: --streamlet do not go with --ordered
consume s --ordered --group g: --ordered and --group are mutually exclusive
consume s --since 10m --from earliest: --from and --since are mutually exclusive
consume s --offset 7 --last 3: --offset and --last are mutually exclusive
consume s --since 10m --group g: use kera group reset to move a group's offsets
consume s --offset 7 --group g: --offset and --group are mutually exclusive
consume s --streamlet 0 --group g: --streamlet and --group are mutually exclusive
consume s --offset 9223372036854775808: --offset
consume s --count 0: --count
consume s --until-end --group g: mutually exclusive
epochs list s --limit 0: --limit
produce s --json --key-separator x: --json and --key-separator are mutually exclusive
generate grafana --force: --force belongs to --out
generate grafana --list --out made: --list is given alone
latency describe c --interval 5s: --interval needs --watch
cluster drain broker-1 --undo --wait: mutually exclusive
group delete g --dry-run: --dry-run needs --idle
schema show --id 7 --version 1: give a SUBJECT
acl revoke --rule 7 --deny: give it alone
check --stream s --entries 2: --stream names one that is there
check --kill-every 5: --kill-every needs --kill
inspect segment --stream 1: --stream is for a data directory
latency alter c --p99 --mean: either --p99 or --mean
stream alter s --retention-consumer-group g --no-retention-consumer-groups: mutually exclusive
"""
"""Options that would have no effect beside others, and the error."""

BY_SETTINGS = {"coordinator", "backup", "broker", "bench produce", "bench consume", "bench e2e"}
"""Commands whose options are the fields of a settings class; `test_every_setting_is_used` covers them."""
ELSEWHERE = {"connect copy"}
"""Commands that `tests/unit/cli/test_connect_effects.py` covers."""
SHARED = {"-b": "-b near:7401", "-o": "-o json", "--json": "--json", "--context": "--context far"}
"""The case of an option for all commands that have it."""
SPIES: dict[str, Any] = {
    "kera.cli._schema_files._compiled": b"",
    "kera.cli.check._report.to_json": [],
    "kera.cli.check._report.to_text": [],
    "kera.cli.diagnosis.asking.look": None,
    "kera.cli.diagnosis.certificates.certificates": [],
    "kera.cli.diagnosis.host.checkup": [],
    "kera.cli.doctor._of_security": [],
    "kera.cli.group.importing._plan": None,
    "kera.cli.group.importing._translated": None,
    "kera.cli.inspect._of_directory": [],
    "kera.cli.top._print": [],
    "kera.cli.verify._Check.run": [],
    "kera.client.diagnosis.cluster.health": [],
    "kera.connect.streams.journal.last_round": None,
}
"""Functions that commands call with the results of the event loop, the machine or a cluster, and their answers; None:
`Anything`."""
GOES_ON = {"top", "check", "doctor", "cluster restore"}
"""Commands with options that take effect after the event loop."""


WRITING = {"context", "generate", "tls"}
"""Commands that change files; each run starts with new files."""


class Command:
    """A line of the table."""

    def __init__(self, line: str) -> None:
        base, *cases = [each.strip() for each in line.split(" | ")]
        self.base = shlex.split(base)
        found = commands()
        self.name = next(name for name in (" ".join(self.base[:2]), self.base[0]) if name in found)
        self.cases = [*cases, *(SHARED[option] for option in found[self.name] if option in SHARED)]
        if self.name == "context set":
            self.cases.remove(SHARED["-b"])

    def runs(self, case: str) -> tuple[list[str], list[str]]:
        """The command line with the option, and the one without."""
        given, _, without = case.partition(" - ")
        option, _, companions = given.partition(" + ")
        base = list(self.base)
        for word in shlex.split(without):
            base.remove(word)
        words, more = shlex.split(option), shlex.split(companions)
        if words[0] in base:  # the option has a value there already
            at = base.index(words[0])
            changed = [*base[:at], *base[at + len(words) :]]
            return [*changed, *more, *words], [*base, *more] if len(words) > 1 else [*changed, *more]
        return [*base, *more, *words], [*base, *more]


@functools.cache
def commands() -> dict[str, list[str]]:
    """The options of each command."""
    found: dict[str, list[str]] = {}

    def walk(command: Any, path: list[str]) -> None:
        for name, each in getattr(command, "commands", {}).items():
            walk(each, [*path, name])
        if not hasattr(command, "commands"):
            options = [each.opts for each in command.params if each.param_type_name != "argument"]
            found[" ".join(path)] = [SHORT.get(each[0], each[0]) for each in options]

    walk(command_of(app), [])
    return found


SHORT = {"--bootstrap": "-b", "--output": "-o"}


def lines(text: str) -> list[str]:
    return text.strip().replace("\n  |", " |").splitlines()


def table() -> list[Command]:
    return [Command(line) for line in lines(EFFECTS)]


def test_every_option_is_in_the_table() -> None:
    found = {name: options for name, options in commands().items() if name not in BY_SETTINGS | ELSEWHERE}
    known: dict[str, set[str]] = {}
    for command in table():
        options = {SHORT.get(each.split()[0], each.split()[0]) for each in command.cases}
        known.setdefault(command.name, set()).update(options)
    missing = {name: set(options) - known.get(name, set()) for name, options in found.items()}
    assert {name: options for name, options in missing.items() if options} == {}
    assert known.keys() == found.keys()


class Answer(list[Any]):
    """The event loop's answer to every command: no problem was found."""

    verdict = "kept"


class Stopped(BaseException):
    """The command has reached the point where it would need a cluster."""


@pytest.fixture
def effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Effect:
    """Runs a command line. Returns its exit code, and all its effects as text."""
    did: list[str] = []
    goes_on = False

    def run_async(coroutine: Coroutine[Any, Any, Any], **_: Any) -> Any:
        did.append(f"{_name(coroutine)} {_shown(inspect.getcoroutinelocals(coroutine))}")
        coroutine.close()
        if not goes_on:
            raise Stopped
        return Answer()

    async def sleep(delay_s: float) -> None:
        did.append(f"sleeps for {delay_s} s")
        raise Stopped

    def spy(name: str, answer: Any) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            did.append(f"{name} {_shown([given, named])}")
            return Anything(did, f"{name}()") if answer is None else answer

        return called

    def run(arguments: list[str]) -> tuple[int, str]:
        nonlocal goes_on
        did.clear()
        goes_on = bool({arguments[0], " ".join(arguments[:2])} & GOES_ON)
        if arguments[0] in WRITING or not (tmp_path / "key").exists():
            make_files(tmp_path)
        code = 0
        with contextlib.suppress(Stopped):
            code = run_app(app, arguments)
        printed = capfd.readouterr()
        kept = (tmp_path / "config" / "kera" / "contexts.json").read_text()
        return code, "\n".join([*did, printed.out, printed.err, kept])

    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("kera.cli.top.sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for module in [module for name, module in sys.modules.items() if name.startswith("kera.cli")]:
        if hasattr(module, "run_async"):
            monkeypatch.setattr(module, "run_async", run_async)
    monkeypatch.setattr("kera.cli._commands.run_async", functools.partial(run_with_anything, did))
    monkeypatch.setattr("asyncio.sleep", sleep)
    monkeypatch.setattr("dataclasses.asdict", _as_dict)
    monkeypatch.setattr("time.time", lambda: NOW_S)
    monkeypatch.setattr("time.time_ns", lambda: NOW_S * 10**9)
    for name, answer in SPIES.items():
        monkeypatch.setattr(name, spy(name, answer))
    return run


NOW_S = 1_800_000_000
_of_dataclass = dataclasses.asdict


def _as_dict(given: Any) -> Any:
    return given if isinstance(given, Anything) else _of_dataclass(given)


def _name(coroutine: Any) -> str:
    return str(coroutine.__qualname__)


def _shown(given: Any) -> str:
    """As text, without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(_plain(given)))


def _plain(given: Any, depth: int = 0) -> Any:
    if isinstance(given, dict):
        return {name: _plain(each, depth) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return [_plain(each, depth) for each in given]
    if "__repr__" not in dir_of(type(given)) and depth < 2:
        return [type(given).__name__, _plain(getattr(given, "__dict__", {}), depth + 1)]
    return given


def dir_of(kind: type) -> set[str]:
    """The names that a class and its parents define, but for `object`."""
    return {name for each in kind.__mro__[:-1] for name in vars(each)}


def make_files(folder: Path) -> None:
    """Make the files that the table names, and remove those of earlier commands."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    for name in ("password", "other", "token", "secret", "ca", "cert", "key", "k.properties", "kera.toml", "segment"):
        (folder / name).write_text(f"{name} of a test\n")
        (folder / name).chmod(0o600)
    for name in ("s.proto", "s.avsc", "s.binpb"):
        (folder / name).write_text('"string"')
    (folder / "columns.arrow").write_bytes(pa.schema([("a", pa.int64())]).serialize())
    (folder / "broker" / "log").mkdir(parents=True)
    for kind in generate.KINDS:
        for name in kind.files:
            (folder / "changed" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "changed" / name).write_text("changed\n")
    contexts = folder / "config" / "kera" / "contexts.json"
    contexts.parent.mkdir(parents=True)
    contexts.write_text(json.dumps({"contexts": {"far": {"bootstrap": "far:7402"}}, "current": ""}))
    contexts.chmod(0o600)


@pytest.mark.parametrize("command", table(), ids=lambda command: command.name)
def test_each_option_changes_the_effects_of_its_command(command: Command, effect: Effect) -> None:
    without_effect = []
    seen: dict[str, str] = {}
    for case in command.cases:
        given, plain = command.runs(case)
        code, with_it = effect(given)
        assert code == 0, f"{shlex.join(given)}: {with_it}"
        if shlex.join(plain) not in seen:
            seen[shlex.join(plain)] = effect(plain)[1]
        if with_it == seen[shlex.join(plain)]:
            without_effect.append(case)
    assert without_effect == []


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_an_option_without_an_effect_is_refused(line: str, effect: Effect) -> None:
    arguments, _, said = line.rpartition(": ")
    code, did = effect(shlex.split(arguments))
    assert (code, len(did.strip().splitlines())) == (2, 3), did  # one line, an empty one, and the file of contexts
    assert said in did


def settings_classes() -> list[type[KeraSettings]]:
    return [CoordinatorSettings, BackupSettings, BrokerSettings, *SETTINGS.values()]


@pytest.mark.parametrize("settings", settings_classes(), ids=lambda each: each.section)
def test_every_setting_is_used(settings: type[KeraSettings]) -> None:
    """`test_settings_flags` tests that each setting is an option; here the code must read it."""
    own = Path(sys.modules[settings.__module__].__file__ or "").parent
    # The folder of the core has kera.server, too.
    core, cli = Path(kera.core.errors.__file__).parents[1], Path(kera.cli.daemons.__file__).parent
    text = "\n".join(source_of(folder) for folder in (own, core, cli))
    assert [name for name in settings.fields() if not re.search(rf"\w\.{name}\b(?! = )", text)] == []


@functools.cache
def source_of(folder: Path) -> str:
    return "\n".join(each.read_text() for each in folder.rglob("*.py"))


def test_an_option_without_an_effect_is_found(effect: Effect) -> None:
    """An option with its default value changes nothing."""
    given, plain = Command("top --once | --interval 2").runs("--interval 2")
    assert effect(given) == effect(plain)
