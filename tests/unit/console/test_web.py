"""Parameters, hosts, forms, charts and sessions, without a cluster."""

import contextlib
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.console.pages.paging import paged
from kera.console.pages.signing import way_on
from kera.console.settings import ConsoleSettings, parse_listen, url_of
from kera.console.watching.sessions import Sessions
from kera.console.watching.view import Histories
from kera.console.web.charts import HEIGHT, WIDTH, ceiling, chart
from kera.console.web.gate import comes_from_us, host_in, is_ours
from kera.console.web.parameters import Parameters
from kera.console.web.problems import Refused
from kera.console.web.tokens import FormTokens
from kera.console.web.words import moment, number, parse_moment, plural, second
from kera.core.base.settings import InvalidSettings
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_span
from kera.core.errors import InvalidArgument


@pytest.mark.parametrize("text", ["-1", "0", "101", "9" * 400, "1.0", "x", " 1", "१", "0x1", "1e3"])
def test_an_invalid_number_is_refused_with_its_parameter(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^page is .* takes a number from 1 to 100$"):
        Parameters.parse(f"page={quote(text)}".encode()).whole("page", 1, 1, 100)


def test_a_missing_or_empty_parameter_has_its_default_or_is_an_error() -> None:
    for encoded in (b"", b"page=", b"page"):
        parameters = Parameters.parse(encoded)
        assert parameters.whole("page", 7, 1, 100) == 7
        assert parameters.optional("page") is None
        with pytest.raises(InvalidArgument, match="page is missing"):
            parameters.whole("page", None)
        with pytest.raises(InvalidArgument, match="page is missing"):
            parameters.text("page", None)


def test_a_repeated_parameter_is_refused_when_it_is_read() -> None:
    parameters = Parameters.parse(b"page=1&page=1&q=x")
    assert parameters.text("q") == "x"
    with pytest.raises(InvalidArgument, match="page is given twice"):
        parameters.whole("page", 1)


@pytest.mark.parametrize("encoded", [b"q=%ff", "q=ü".encode(), b"&".join(b"a%d=1" % n for n in range(40))])
def test_invalid_text_or_too_many_parameters_are_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidArgument):
        Parameters.parse(encoded)


def test_long_texts_unknown_choices_and_invalid_times_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="q has 257 characters"):
        Parameters.parse(b"q=" + b"x" * 257).text("q")
    with pytest.raises(InvalidArgument, match="takes one of newest, oldest"):
        Parameters.parse(b"from=now").choice("from", ("newest", "oldest"))
    with pytest.raises(InvalidArgument, match="takes a time in UTC like"):
        Parameters.parse(b"time=yesterday").moment("time")


@given(st.binary(max_size=200))
def test_any_query_is_parsed_or_refused(encoded: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        Parameters.parse(encoded).whole("a", 1)


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("localhost:7480", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("127.0.0.1:7480", True),
        ("10.1.2.3", True),
        ("[::1]:7480", True),
        ("evil.example", False),
        ("evil.example:7480", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("", False),
        ("[::1", False),
        ("[::1]x", False),
        ("::1", False),
        ("a:b:c", False),
    ],
)
def test_only_own_names_and_addresses_are_accepted_as_host(header: str, ours: bool) -> None:
    assert is_ours(header, {"localhost"}) is ours


def test_a_host_is_read_without_its_port() -> None:
    assert [host_in(each) for each in ("a:1", "[::1]:1", "[::1]", "A.")] == ["a", "::1", "::1", "a"]


@pytest.mark.parametrize(
    ("headers", "ours"),
    [
        ({b"host": b"a:1", b"origin": b"http://a:1"}, True),
        ({b"host": b"a:1", b"origin": b"https://a:1"}, True),
        ({b"host": b"a:1", b"origin": b"http://a:2"}, False),
        ({b"host": b"a:1", b"origin": b"null"}, False),
        ({b"host": b"a:1", b"origin": b""}, False),
        ({b"host": b"a:1", b"sec-fetch-site": b"same-origin"}, True),
        ({b"host": b"a:1", b"sec-fetch-site": b"same-site"}, False),
        ({b"host": b"a:1"}, False),
        ({b"origin": b"http://"}, False),
    ],
)
def test_a_request_comes_from_the_console_if_origin_and_host_agree(headers: dict[bytes, bytes], ours: bool) -> None:
    assert comes_from_us(headers) is ours


def test_a_form_token_is_valid_only_with_its_cookie() -> None:
    tokens, others = FormTokens(), FormTokens()
    cookie = tokens.new_cookie()
    assert tokens.is_good(cookie, tokens.token(cookie))
    for given_cookie, token in [("", tokens.token("")), (cookie, ""), (cookie, "ü"), (cookie, others.token(cookie))]:
        assert not tokens.is_good(given_cookie, token)


@pytest.mark.parametrize(
    ("address", "to"),
    [
        ("/streams?q=a", "/streams?q=a"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/\n/evil.example", "/"),
        ("", "/"),
        ("/sign-out", "/"),
    ],
)
def test_a_sign_in_redirects_only_to_pages_of_the_console(address: str, to: str) -> None:
    assert way_on(address) == to


def test_a_session_ends_after_its_idle_time_since_the_last_use() -> None:
    now = 0.0
    sessions: Sessions[str] = Sessions(lambda: now, idle_s=10)
    session, _ = sessions.begin("ada", "view")
    now = 9.0
    assert sessions.find(session.token) is session
    now = 18.0
    assert sessions.find(session.token) is session
    now = 28.0
    assert sessions.find(session.token) is None
    assert sessions.expire() == [session]
    assert len(sessions) == 0


def test_sessions_are_limited_in_total_and_per_user() -> None:
    now = 0.0
    sessions: Sessions[int] = Sessions(lambda: now, sessions_max=3, per_user_max=2)
    first, _ = sessions.begin("ada", 1)
    now = 1.0
    second, _ = sessions.begin("ada", 2)
    now = 2.0
    assert sessions.find(first.token) is first
    _, ended = sessions.begin("ada", 3)
    assert ended == [second], "the one that was idle for longest"
    sessions.begin("eve", 4)
    with pytest.raises(Refused, match="3 sessions are the most"):
        sessions.begin("bob", 5)
    sessions.begin("ada", 6)
    assert len(sessions) == 3


def test_the_token_of_a_session_is_long_and_not_in_its_representation() -> None:
    sessions: Sessions[int] = Sessions(lambda: 0.0)
    session, _ = sessions.begin("ada", 1)
    assert session.token not in repr(session)
    assert len(session.token) >= 43


def test_histories_are_bounded_and_watched_ones_replace_offered_ones() -> None:
    now = 0.0
    histories = Histories(lambda: now, things_max=2, points_max=3)
    histories.offer("a")
    histories.offer("b")
    histories.offer("c")
    assert histories.watched == ["a", "b"]
    histories.watch("a")
    histories.watch("c")
    assert histories.watched == ["a", "c"]
    for now in range(5):
        histories.add("a", now * 10)
        histories.add("z", 1)
    assert histories.of("a") == [(2, 20), (3, 30), (4, 40)]
    assert histories.of("z") == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e15)), max_size=30))
def test_the_line_of_a_chart_stays_within_its_box(values: list[float | None]) -> None:
    drawn = chart([(float(at), value) for at, value in enumerate(values)])
    numbers = [float(part) for point in drawn.line.replace("M", " ").replace("L", " ").split() for part in [point]]
    assert all(-0.1 <= x <= WIDTH + 0.1 for x in numbers[::2])
    assert all(-0.1 <= y <= HEIGHT + 0.1 for y in numbers[1::2])


def test_the_line_of_a_chart_has_a_gap_at_unknown_values() -> None:
    drawn = chart([(0, 1), (1, 2), (2, None), (3, 3), (4, 4)])
    assert drawn.line.count("M") == 2
    assert drawn.top == 5
    assert chart([(0, None), (1, None), (2, 1), (3, 1)]).span_s == 1
    assert chart([]).line == chart([(0, 1)]).line == chart([(0, 1), (0, 2)]).line == ""
    assert [chart([(0, value)], binary=True).top for value in (0, 1, 1500, 4096)] == [1, 1, 2048, 4096]
    assert [ceiling(value) for value in (0, 1, 1.5, 7, 11, 999)] == [1, 1, 2, 10, 20, 1000]


def test_a_page_number_beyond_the_end_shows_the_last_page() -> None:
    rows = list(range(101))
    assert [paged(rows, number).rows[0] for number in (1, 2, 3, 99)] == [0, 50, 100, 100]
    assert (paged(rows, 2).first, paged(rows, 2).pages, paged([], 5).first) == (51, 3, 0)


@pytest.mark.parametrize(
    ("text", "found"),
    [("7480", ("127.0.0.1", 7480)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:80", ("::1", 80)), ("host:1", ("host", 1))],
)
def test_addresses_to_listen_on_are_parsed(text: str, found: tuple[str, int]) -> None:
    assert parse_listen(text) == found


@pytest.mark.parametrize("text", ["", ":80", "host", "host:", "host:65536", "host:-1", "::1:80", "host:८०"])
def test_invalid_addresses_to_listen_on_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--listen"):
        parse_listen(text)


def test_a_console_beyond_this_host_needs_tls_and_security_or_the_insecure_option(tmp_path: Path) -> None:
    plain = ConsoleSettings("0.0.0.0")
    for secured in (False, True):
        with pytest.raises(InvalidSettings, match="--tls-cert"):
            plain.check_reach(secured=secured)
        ConsoleSettings("127.0.0.1").check_reach(secured=secured)
        ConsoleSettings("0.0.0.0", insecure=True).check_reach(secured=secured)
    encrypted = ConsoleSettings("0.0.0.0", tls_cert=tmp_path / "c", tls_key=tmp_path / "k")
    encrypted.check_reach(secured=True)
    with pytest.raises(InvalidSettings, match="security of the cluster is off"):
        encrypted.check_reach(secured=False)


def test_invalid_or_contradictory_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="belong together"):
        ConsoleSettings(tls_cert=tmp_path / "c").check()
    with pytest.raises(InvalidSettings, match="is not a host name"):
        ConsoleSettings(names=("https://x",)).check()
    with pytest.raises(InvalidSettings, match="No such file"):
        ConsoleSettings(tls_cert=tmp_path / "c", tls_key=tmp_path / "k").tls()


def test_the_url_of_the_console_names_its_host_and_port() -> None:
    assert url_of(ConsoleSettings("::1"), 1) == "http://[::1]:1/"
    assert url_of(ConsoleSettings("0.0.0.0", names=("console.example",)), 1) == "http://console.example:1/"


def test_numbers_sizes_and_times_are_formatted_readably() -> None:
    assert [format_size(each) for each in (0, 1023, 1024, 1536, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 TiB",
    ]
    assert number(1234567) == "1\u202f234\u202f567"
    assert [format_span(each) for each in (0.12, 4.5, 300, 7200, 172800, 4e8)] == [
        "120 ms",
        "4.5 s",
        "5 min",
        "2 h",
        "2 d",
        "4630 d",
    ]
    assert plural(1, "entry", "entries") == "1 entry"
    assert plural(2, "entry", "entries") == "2 entries"
    assert (moment(1_500_000), second(1_500_000)) == ("1970-01-01 00:00:01.500", "1970-01-01 00:00:01")
    assert moment(1 << 62).endswith("µs")
    assert parse_moment("2026-01-31T12:00") == parse_moment("2026-01-31T13:00+01:00")
