"""Synchronous code gets the client's answers and errors, and leaves no thread running."""

import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from kera.client import Client
from kera.core.errors import InternalError, Unavailable, UnknownStream
from kera.spark_connector.connection import Connection
from kera.spark_connector.portal import SHARED_IDLE_MAX, Portal, shared
from tests.unit.spark_connector.fakes import FakeClient


@pytest.fixture
def portal(cluster: FakeClient) -> Iterator[Portal]:  # noqa: ARG001  # it is what the portal finds
    portal = Portal(Connection("h:1"))
    yield portal
    portal.close()


def test_the_client_connects_once_and_only_on_the_first_call(portal: Portal, cluster: FakeClient) -> None:
    assert cluster.connected == 0

    for _ in range(2):
        portal.call(lambda client: client.describe("numbers"))

    assert cluster.connected == 1


def test_an_error_of_the_client_has_a_short_traceback(portal: Portal) -> None:
    with pytest.raises(UnknownStream, match="nothing") as caught:
        portal.call(lambda client: client.describe("nothing"))

    assert len(caught.traceback) == 3  # this test, `call`, and the line that raises


def test_an_internal_error_keeps_its_traceback(portal: Portal) -> None:
    async def fail(_: Client) -> None:
        raise InternalError("a defect")

    with pytest.raises(InternalError) as caught:
        portal.call(fail)

    assert caught.traceback[-1].name == "fail"


def test_an_iteration_keeps_the_order_and_ends(portal: Portal) -> None:
    async def numbers(_: Client) -> AsyncGenerator[int, None]:
        for number in range(100):
            yield number

    assert list(portal.iterate(numbers, ahead=2)) == list(range(100))


def test_an_iteration_fetches_no_further_ahead_than_allowed(portal: Portal) -> None:
    fetched: list[int] = []

    async def numbers(_: Client) -> AsyncGenerator[int, None]:
        for number in range(100):
            fetched.append(number)
            yield number

    for taken in portal.iterate(numbers, ahead=2):
        assert len(fetched) <= taken + 1 + 2 + 1  # taken, waiting, and in hand


def test_an_error_comes_after_the_items_before_it(portal: Portal) -> None:
    async def numbers(_: Client) -> AsyncGenerator[int, None]:
        yield 1
        raise Unavailable("gone")

    taken: list[int] = []
    with pytest.raises(Unavailable, match="gone"):
        taken.extend(portal.iterate(numbers, ahead=2))
    assert taken == [1]


def test_an_iteration_that_ends_early_closes_its_generator(portal: Portal) -> None:
    closed = threading.Event()

    async def numbers(_: Client) -> AsyncGenerator[int, None]:
        try:
            for number in range(100):
                yield number
        finally:
            closed.set()

    iteration = portal.iterate(numbers, ahead=2)
    assert next(iteration) == 0
    iteration.close()  # type: ignore[attr-defined]  # it is a generator

    assert closed.wait(10)


def test_closing_twice_closes_the_client_and_ends_the_thread(portal: Portal, cluster: FakeClient) -> None:
    portal.call(lambda client: client.describe("numbers"))
    before = portal_threads()  # shared portals live as long as the process, and those of other tests may do so

    portal.close()
    portal.close()

    assert cluster.closed
    assert len(before - portal_threads()) == 1


def portal_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kera-portal"}


@pytest.mark.usefixtures("cluster")
def test_a_process_shares_one_portal_per_address() -> None:
    with shared(Connection("h:1")) as first, shared(Connection("h:1")) as again, shared(Connection("h:2")) as other:
        assert first is again
        assert first is not other


def test_a_portal_in_use_is_not_evicted_by_others(cluster: FakeClient) -> None:
    with shared(Connection("h:1")) as portal:
        for number in range(SHARED_IDLE_MAX + 2):
            with shared(Connection(f"other:{number}")) as other:
                other.call(lambda client: client.describe("numbers"))
        assert cluster.closed, "others are"
        assert portal.call(lambda client: client.describe("numbers")).name == "numbers"
        with shared(Connection("h:1")) as again:
            assert again is portal
