"""The last use of consumer groups: what counts as use, when it is stored, and which groups expire."""

from __future__ import annotations

from kera.coordinator.consumer_groups.uses import CLOCK, NOTE_MS_MAX, USES, Uses
from kera.v1 import consumer_group_pb2 as messages

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS


def of(value: bytes | None) -> messages.ConsumerGroupUse:
    assert value is not None
    return messages.ConsumerGroupUse.FromString(value)


def again(uses: Uses, stored: dict[str, bytes], now_s: float) -> Uses:
    """Restore the uses as the next coordinator does, at another monotonic time."""
    made = Uses(uses.retention_ms, now_s, int(stored.get(CLOCK, b"0")))
    for key, value in stored.items():
        if key.startswith(USES):
            made.restore(messages.ConsumerGroupUse.FromString(value))
    return made


def store(stored: dict[str, bytes], uses: Uses, now_s: float) -> None:
    for key, value in uses.take_changes(now_s).items():
        if value is None:
            del stored[key]
        else:
            stored[key] = value


def test_an_unnamed_group_expires_when_it_is_unused_for_the_retention() -> None:
    uses = Uses(WEEK_MS, 100.0)
    uses.use("made-up", 100.0, unnamed=True)
    uses.use("chosen", 100.0)
    almost_s, over_s = 99.0 + WEEK_MS / 1000, 100.0 + WEEK_MS / 1000
    assert uses.expired(["made-up", "chosen", "unknown"], almost_s, ()) == []
    assert uses.expires_in_ms("made-up", almost_s) == 1000
    assert uses.expired(["made-up", "chosen", "unknown"], over_s, ()) == ["made-up"]
    assert uses.expired(["made-up"], over_s, {"made-up"}) == [], "somebody has named it elsewhere"
    uses.use("made-up", over_s, unnamed=True)
    assert uses.expired(["made-up"], over_s, ()) == []
    assert uses.expires_in_ms("chosen", over_s) is None


def test_no_group_expires_without_a_retention() -> None:
    uses = Uses(0, 0.0)
    uses.use("made-up", 0.0, unnamed=True)
    assert uses.expired(["made-up"], 1e9, ()) == []
    assert uses.expires_in_ms("made-up", 1e9) is None


def test_a_group_used_by_its_name_stays_named() -> None:
    uses = Uses(WEEK_MS, 0.0)
    uses.use("q", 0.0, unnamed=True)
    uses.take_changes(0.0)
    uses.use("q", 1.0)
    assert not of(uses.take_changes(1.0)[USES + "q"]).unnamed, "that is written down at once"
    uses.use("q", 2.0, unnamed=True)
    assert not uses.is_unnamed("q")


def test_uses_are_written_at_intervals() -> None:
    uses = Uses(WEEK_MS, 0.0)
    uses.use("q", 0.0, unnamed=True)
    assert set(uses.take_changes(0.0)) == {USES + "q", CLOCK}
    for second in range(1, NOTE_MS_MAX // 1000):
        uses.use("q", float(second), unnamed=True)
        assert not uses.dirty
    uses.use("q", NOTE_MS_MAX / 1000, unnamed=True)
    assert of(uses.take_changes(NOTE_MS_MAX / 1000)[USES + "q"]).used_ms == NOTE_MS_MAX
    assert uses.idle_ms("q", NOTE_MS_MAX / 1000 + 5) == 5000


def test_a_change_that_could_not_be_stored_is_stored_later() -> None:
    uses = Uses(WEEK_MS, 0.0)
    uses.use("q", 0.0, unnamed=True)
    uses.not_stored(uses.take_changes(0.0))
    assert of(uses.take_changes(1.0)[USES + "q"]).unnamed
    uses.forget("q")
    uses.not_stored(uses.take_changes(2.0))
    assert uses.take_changes(3.0)[USES + "q"] is None


def test_time_counts_only_while_a_coordinator_leads() -> None:
    stored: dict[str, bytes] = {}
    uses = Uses(WEEK_MS, 1_000_000.0)
    uses.use("q", 1_000_000.0, unnamed=True)
    store(stored, uses, 1_000_000.0)
    monotonic_s = 7.0  # another host, whose clock began anew
    for _ in range(6):  # each leads for a day and is away for a year
        uses = again(uses, stored, monotonic_s)
        assert uses.expired(["q"], monotonic_s, ()) == []
        monotonic_s += DAY_MS / 1000
        assert uses.clock_due(monotonic_s)
        store(stored, uses, monotonic_s)
        monotonic_s += 365 * DAY_MS / 1000
    uses = again(uses, stored, 0.0)
    assert uses.expires_in_ms("q", 0.0) == DAY_MS
    assert uses.expired(["q"], DAY_MS / 1000, ()) == ["q"]


def test_forgetting_a_group_deletes_its_record_and_an_unstored_group_needs_no_write() -> None:
    uses = Uses(WEEK_MS, 0.0)
    uses.use("short", 0.0)
    uses.forget("short")
    assert not uses.dirty
    uses.use("q", 0.0)
    uses.take_changes(0.0)
    uses.forget("q")
    assert uses.take_changes(0.0)[USES + "q"] is None
    assert not uses.is_unnamed("q")


def test_a_group_from_an_earlier_version_counts_as_used_now() -> None:
    uses = Uses(WEEK_MS, 0.0, 5 * WEEK_MS)
    assert uses.idle_ms("old", 10.0) == 0
    assert uses.idle_ms("old", 12.0) == 2000
    assert not uses.is_unnamed("old")


def test_uses_are_noted_more_often_for_a_short_retention() -> None:
    assert Uses(80, 0.0).note_ms == 10
    assert Uses(1, 0.0).note_ms == 1
    assert Uses(10 * WEEK_MS, 0.0).note_ms == NOTE_MS_MAX
