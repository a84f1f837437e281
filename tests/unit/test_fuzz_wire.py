"""A short run of ``make fuzz-wire`` over all decoders, its kept inputs, and defects that it must find."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kera.core.rpc import api
from kera.core.rpc.method import Method
from kera.core.security.issuing import Authority
from tests.fuzz import corpus, running
from tests.fuzz.exchanges import METHODS, filled, request_of, theirs
from tests.fuzz.hello import hello, spoilt_hello
from tests.fuzz.ports import PROTOCOLS, SERVICES, Sent, World, methods_of, request
from tests.fuzz.protobuf import data_of, fields_of, spoilt
from tests.fuzz.target import outcome, random_of
from tests.fuzz.targets import TARGETS
from tests.integration.field_cases import CASES
from tests.unit.fuzz_selftest import TARGETS as SELFTEST

SEED = 7
INPUTS = 120
"""Inputs per target."""
WORLD = World(theirs(), frozenset({"of-another"}), frozenset({9}), frozenset({1, 2}), tuple(range(50, 60)))
STILL_S = 1.0


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_are_read_or_refused(name: str) -> None:
    kept = list(corpus.kept(name))
    assert len(kept) > 1
    for each in kept:
        assert outcome(TARGETS[name], each.data), each.name


@pytest.mark.parametrize("name", TARGETS)
def test_generated_inputs_are_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    outcomes = {outcome(target, target.make(random_of(name, SEED, number))) for number in range(INPUTS)}
    assert len(outcomes) > 1, "some are good, and some are not"


def test_a_seed_determines_the_generated_inputs() -> None:
    def made(name: str, seed: int) -> list[bytes]:
        return [TARGETS[name].make(random_of(name, seed, number)) for number in range(5)]

    for name in TARGETS:
        assert made(name, 1) == made(name, 1) != made(name, 2), name


@pytest.mark.slow
def test_kept_inputs_reach_most_lines_of_the_decoders() -> None:
    for module in (
        "kera.core.format.lean.layout",
        "kera.core.format.record_batch",
        "kera.core.push",
        "kera.core.format.schema",
    ):
        wanted = corpus.lines_of(module)
        found = set()
        for target in TARGETS.values():
            if module in target.modules:
                for each in corpus.kept(target.name):
                    found |= corpus.reached_by(target, each.data, wanted)
        assert len(found) > 0.8 * len(wanted), module


# -- found defects -----------------------------------------------------------------------------------------------------


def found_in(name: str) -> running.Report:
    return running.run(SELFTEST[name], SEED, 30.0, inputs_max=30, module="tests.unit.fuzz_selftest")


def test_an_input_that_ends_the_process_is_found_and_the_run_continues() -> None:
    report = found_in("ends")
    assert report.inputs == 30
    ended = [defect for defect in report.defects if "ended with 7" in defect]
    wrong = [defect for defect in report.defects if "InternalError" in defect or "IndexError" in defect]
    assert ended
    assert wrong
    assert "read" in report.outcomes
    number = int(ended[0].split(" input ")[1].split(":")[0])
    assert SELFTEST["ends"].make(random_of("ends", SEED, number)) == b"\x03"


def test_an_input_that_never_returns_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "STILL_S_MAX", STILL_S)
    report = found_in("stands-still")
    assert any("never returned" in defect for defect in report.defects)
    assert report.inputs == 30


def test_an_input_that_takes_memory_is_found() -> None:
    report = found_in("takes-memory")
    assert any("MemoryError" in defect for defect in report.defects)


# -- requests to daemons -----------------------------------------------------------------------------------------------


def test_each_method_is_requested_from_all_roles_that_have_it() -> None:
    known = {each for each in vars(api).values() if isinstance(each, Method)}
    assert set(METHODS) == known
    asked = {role: {methods_of(role, Random(number)) for number in range(3_000)} for role in SERVICES}
    for method in METHODS:
        assert request_of(method, theirs()) is not None
        owners = [role for role, services in SERVICES.items() if method.service in services] or list(SERVICES)
        assert all(method in asked[role] for role in owners), method.name


def test_a_decomposed_message_can_be_reassembled() -> None:
    for method in METHODS:
        for message in (request_of(method, theirs()), filled(method.request), filled(method.response)):
            data = message.SerializeToString()
            assert type(message).FromString(data_of(fields_of(data, message.DESCRIPTOR))) == message, method.name
            changed = {spoilt(message, Random(number)) for number in range(20)}
            assert len(changed) > 1 or not message.DESCRIPTOR.fields, method.name


@pytest.mark.parametrize("kind", PROTOCOLS)
@pytest.mark.parametrize("role", SERVICES)
def test_a_seed_determines_the_sent_data(role: str, kind: str) -> None:
    for protocol in PROTOCOLS[kind]:
        sent = [[protocol(role, WORLD, Random(number)) for number in range(20)] for _ in range(2)]
        assert sent[0] == sent[1]
        assert len(set(map(repr, sent[0]))) > 1


@pytest.mark.parametrize("role", SERVICES)
def test_each_method_has_a_valid_request_about_own_objects_only(role: str) -> None:
    world = replace(WORLD, valid=1.0)
    asked = {methods_of(role, Random(number)) for number in range(3_000)}
    for method in asked:
        assert request(method, world, Random(1)), method.name


def test_a_tls_server_answers_the_hello_that_is_then_spoilt(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(one.cert, one.key)
    said, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    said.write(hello())
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(said, answered, server_side=True).do_handshake()
    assert answered.pending > 100
    assert len({spoilt_hello(Random(number)) for number in range(50)}) > 20


def test_requests_about_objects_of_others_are_not_allowed() -> None:
    request = CASES[api.TRUNCATE_STREAMLETS].build(theirs())
    assert WORLD.allows(api.TRUNCATE_STREAMLETS, request.SerializeToString())
    for cursor in request.cursors:  # type: ignore[attr-defined]  # it has some
        cursor.stream_id = 9
    assert not WORLD.allows(api.TRUNCATE_STREAMLETS, request.SerializeToString())
    drained = api.DRAIN.request(broker_id=2)
    assert not WORLD.allows(api.DRAIN, drained.SerializeToString())
    assert not WORLD.allows(api.DELETE_STREAM, api.DELETE_STREAM.request(name="of-another").SerializeToString())


def test_sent_frames_are_marked_as_whole_or_not() -> None:
    sent = [PROTOCOLS["frames_address"][0]("broker", WORLD, Random(number)) for number in range(40)]
    assert any(isinstance(each, Sent) and each.requests for each in sent)
    assert any(isinstance(each, Sent) and not each.requests for each in sent)
