"""Push: a reader gets no more than its window allows and its connection takes."""

from kera.core.push import WINDOW_BYTES_MAX, window_bytes_max
from tests.unit.broker.push_support import SLOTS, PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES

WINDOW_BYTES = window_bytes_max(SLOTS, 4 * CHUNK_BYTES)
"""The largest window of a reader."""


def test_nothing_is_pushed_beyond_the_window_until_the_reader_takes_chunks(node: PushNode, reader: Reader) -> None:
    node.append(10)
    reader.subscribe(lane(), window_bytes=3 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1, 2]}
    reader.take(CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1, 2, 3]}
    node.append(1)
    assert node.loop.soon == [], "an append is not work while the window is shut"
    reader.take(3 * CHUNK_BYTES)
    node.run()

    assert reader.sequences == {1: list(range(7))}


def test_a_window_can_be_changed_but_never_above_a_share_of_the_memory(node: PushNode, reader: Reader) -> None:
    node.append(2 * WINDOW_BYTES // CHUNK_BYTES)
    reader.subscribe(lane(), window_bytes=CHUNK_BYTES)
    node.run()
    assert reader.pushed_bytes == CHUNK_BYTES
    reader.subscribe()
    node.run()
    assert reader.pushed_bytes == CHUNK_BYTES, "0 leaves it as it is"
    reader.subscribe(window_bytes=WINDOW_BYTES_MAX)
    node.run()

    assert reader.pushed_bytes == WINDOW_BYTES


def test_a_chunk_larger_than_the_window_comes_alone_when_nothing_is_outstanding(node: PushNode, reader: Reader) -> None:
    node.append(1)
    node.append(1, size=4 * CHUNK_BYTES)
    node.append(1)
    reader.subscribe(lane(), window_bytes=2 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0]}
    reader.take(CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1]}, "it is larger, and the next one has to wait"
    reader.take(4 * CHUNK_BYTES)
    node.run()

    assert reader.sequences == {1: [0, 1, 2]}


def test_other_lanes_do_not_overtake_a_large_chunk_for_ever(node: PushNode, reader: Reader) -> None:
    node.append(1, size=4 * CHUNK_BYTES)
    node.append(20, producer=1)
    reader.subscribe(lane(2, entry=1), lane(1), window_bytes=2 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {2: [0, 1]}
    reader.take(CHUNK_BYTES)
    node.run()
    node.append(1, producer=1)
    assert node.loop.soon == []
    assert reader.sequences == {2: [0, 1]}, "the large one's turn"
    reader.take(CHUNK_BYTES)
    node.run()

    assert reader.sequences == {2: [0, 1], 1: [0]}


# --- a paused or lost connection ---------------------------------------------------------------------------


def test_nothing_is_sent_while_the_connection_is_paused(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane())
    reader.connection.pause()
    node.append(2)
    node.run()
    assert reader.messages == []
    assert node.loop.soon == []
    reader.connection.resume()
    node.append(1)
    node.run()

    assert [run.length_bytes for run in reader.runs] == [3 * CHUNK_BYTES]


def test_a_scheduled_flush_sends_nothing_once_the_reader_is_paused_or_lost(node: PushNode, reader: Reader) -> None:
    other = Reader(node)
    for each in (reader, other):
        each.subscribe(lane())
    node.append(1)
    reader.connection.pause()
    other.connection.lost()
    node.run()
    assert reader.messages == other.messages == []
    reader.connection.resume()
    node.run()

    assert reader.sequences == {1: [0]}
