"""Headers: pairs in order, with access by name."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client import Headers
from kera.client.headers import pairs_of
from kera.core.errors import InvalidArgument

NAMES = st.sampled_from(["", "a", "b", "ü", "a\x00"])
PAIRS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=2)), max_size=30)


@given(PAIRS)
def test_headers_keep_every_pair_in_order(pairs: list[tuple[str, bytes | None]]) -> None:
    headers = Headers(pairs)
    assert headers.pairs == tuple(pairs) == Headers(headers).pairs == pairs_of(iter(pairs))
    assert headers == Headers(pairs) == pickle.loads(pickle.dumps(headers)) == copy.deepcopy(headers)
    assert (headers == Headers(pairs[::-1])) == (pairs == pairs[::-1])
    for name in ["", "a", "b"]:
        assert headers.get_all(name) == tuple(value for each, value in pairs if each == name)
        assert headers.add(name, b"x").pairs == (*pairs, (name, b"x"))
        assert headers.without(name).pairs == tuple(pair for pair in pairs if pair[0] != name)


@given(PAIRS)
def test_headers_are_a_mapping_of_each_name_to_its_last_value(pairs: list[tuple[str, bytes | None]]) -> None:
    headers, last = Headers(pairs), dict(pairs)
    assert (dict(headers), list(headers), len(headers)) == (last, list(last), len(last))
    assert all(headers[name] == value and name in headers for name, value in last.items())
    assert (headers == last) == (len(last) == len(pairs))
    assert "absent" not in headers
    assert headers.get("absent") is None
    assert isinstance(headers, Mapping)


def test_headers_that_repeat_no_name_equal_a_dict_in_any_order() -> None:
    headers = Headers([("a", b"1"), ("b", None)])
    assert headers == {"b": None, "a": b"1"}
    assert headers != {"a": b"1"}
    assert headers != [("a", b"1"), ("b", None)]
    assert repr(headers) == "Headers([('a', b'1'), ('b', None)])"


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        (5, "headers is 5, and takes a mapping of names to bytes, or"),
        ("ab", "headers is 'ab'"),
        (b"ab", "headers is b'ab'"),
        (["ab"], "headers is"),
        ([("a", b"1", b"2")], "headers is"),
        ([("a",)], "headers is"),
        ({5: b"1"}, "a header's name is text, not 5"),
        ([(b"a", b"1")], "a header's name is text, not b'a'"),
        ({"\ud800": b"1"}, "a header's name is text, not"),
        ({"a": "text"}, "header 'a' is str, not bytes or None; encode it first"),
        ([("a", 5)], "header 'a' is int, not bytes or None"),
    ],
)
def test_invalid_headers_are_refused(headers: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Headers(headers)
    if isinstance(headers, list) and len(headers[0]) == 2 and headers != ["ab"]:
        with pytest.raises(InvalidArgument, match=text):
            Headers().add(*headers[0])
