"""Errors keep their class, message and attributes, by wire and by pickle."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from kera.core import errors
from kera.core.errors import (
    InternalError,
    KeraError,
    NotAccepted,
    NotPersisted,
    NotReplicated,
    StartError,
    Uncertain,
    UnknownStream,
    error_from_wire,
    error_to_attributes,
    invariant,
)
from kera.core.rpc.limits import ERROR_TEXT_BYTES_MAX
from kera.core.rpc.wire import error_from_message, error_to_message
from kera.v1 import common_pb2


def classes(root: type[KeraError] = KeraError) -> Iterator[type[KeraError]]:
    yield root
    for subclass in root.__subclasses__():
        yield from classes(subclass)


ALL_OF_CORE = [cls for cls in classes() if cls.__module__.startswith("kera.core.")]
ATTRIBUTES: dict[str, Any] = {"stream": "orders", "limit": 8, "ratio": 0.5, "ok": None, "gap": {"from": [1, 2]}}


def through_the_wire(error: BaseException) -> KeraError:
    data = error_to_message(error).SerializeToString()
    return error_from_message(common_pb2.Error.FromString(data))


def test_each_class_survives_the_wire() -> None:
    for cls in ALL_OF_CORE:
        arrived = through_the_wire(cls("what to do", **ATTRIBUTES))

        assert type(arrived) is cls
        assert (arrived.message, str(arrived)) == ("what to do", "what to do")
        assert arrived.attributes == ATTRIBUTES
        assert error_to_message(arrived).retriable is cls.retriable


def test_each_class_can_be_pickled_and_copied() -> None:
    for cls in ALL_OF_CORE:
        error = cls("what to do", **ATTRIBUTES)

        for arrived in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(arrived) is cls
            assert (arrived.message, str(arrived), arrived.attributes) == ("what to do", "what to do", ATTRIBUTES)


def test_each_class_has_its_own_docstring() -> None:
    for cls in ALL_OF_CORE:
        assert cls.__doc__, cls
        assert cls.__doc__ != cls.__base__.__doc__, cls


def test_each_class_has_its_own_code() -> None:
    codes = [cls.code for cls in ALL_OF_CORE]

    assert len(set(codes)) == len(codes)
    assert len(codes) > 20


def test_all_lists_every_error_in_order() -> None:
    public = {cls.__name__ for cls in ALL_OF_CORE if cls.__module__ == errors.__name__}

    assert public <= set(errors.__all__)
    assert sorted(errors.__all__, key=lambda name: (not name[0].isupper(), name)) == errors.__all__


def test_all_other_errors_are_below_not_accepted_or_start_error() -> None:
    # Records may have been stored only after these errors; a `StartError` comes before there is anything to store.
    others = {cls for cls in ALL_OF_CORE if not issubclass(cls, NotAccepted | StartError)}

    assert others == {KeraError, InternalError, Uncertain, NotPersisted, NotReplicated}


def test_a_class_without_a_code_arrives_as_its_base() -> None:
    class OwnError(UnknownStream):
        """A user's refinement."""

    assert type(through_the_wire(OwnError("gone", stream="a"))) is UnknownStream
    assert type(through_the_wire(UnknownStream("gone", stream="a"))) is UnknownStream


def test_an_unknown_code_arrives_as_an_internal_error_that_names_it() -> None:
    error = error_from_wire("from_the_future", "what to do", {"stream": '"orders"'})

    assert type(error) is InternalError
    assert error.message == "what to do"
    assert error.attributes == {"code": "from_the_future", "stream": "orders"}


def test_a_foreign_exception_arrives_as_an_internal_error_with_its_type_and_text() -> None:
    arrived = through_the_wire(ValueError("no such luck"))

    assert type(arrived) is InternalError
    assert arrived.message == "ValueError: no such luck"


def test_attributes_without_a_json_form_arrive_as_text() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless

    error = UnknownStream("what to do", path=object, keys={(1, 2): 3}, endless=endless, raw=b"\xff")

    assert all(isinstance(value, str) for value in error_to_attributes(error).values())
    assert through_the_wire(error).attributes == {
        "path": "<class 'object'>",
        "keys": "{(1, 2): 3}",
        "endless": "{'self': {...}}",
        "raw": "b'\\xff'",
    }


def test_attributes_may_have_any_name() -> None:
    # They come from the network, so no name may clash with a parameter.
    attributes = {"message": 1, "self": 2, "cls": 3, "code": 4, "attributes": 5, "": 6}

    assert through_the_wire(UnknownStream("what to do", **attributes)).attributes == attributes
    assert pickle.loads(pickle.dumps(UnknownStream("what to do", **attributes))).attributes == attributes


def test_an_attribute_that_is_not_json_is_kept_as_text() -> None:
    assert error_from_wire("unknown_stream", "", {"stream": "{", "deep": "[" * 100_000}).attributes == {
        "stream": "{",
        "deep": "[" * 100_000,
    }


@pytest.mark.parametrize("character", ["x", "ä", "🦀", "\udcff"])
def test_a_long_error_is_shortened_for_the_wire(character: str) -> None:
    error = UnknownStream(character * 100_000, short=1, long=character * 100_000, after=2)

    message = error_to_message(error)

    assert len(message.message.encode()) <= ERROR_TEXT_BYTES_MAX
    assert message.message.endswith("...")
    assert dict(message.attributes) == {"short": "1"}  # up to the limit of length
    assert len(message.SerializeToString()) < 2 * ERROR_TEXT_BYTES_MAX + 200


def test_text_that_is_not_unicode_arrives_escaped() -> None:
    # A file name of the wrong encoding is the usual source.
    arrived = through_the_wire(UnknownStream("no stream 'caf\udce9'", **{"caf\udce9": "caf\udce9"}))

    assert arrived.message == r"no stream 'caf\udce9'"
    assert arrived.attributes == {r"caf\udce9": "caf\udce9"}


def test_an_invariant_that_holds_raises_no_error() -> None:
    invariant(1, "one is true")


def test_a_broken_invariant_is_an_internal_error_with_its_attributes() -> None:
    with pytest.raises(InternalError, match="invariant broken: head moved back") as caught:
        invariant([], "head moved back", head=3)

    assert caught.value.attributes == {"head": 3}
