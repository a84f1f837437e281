"""Refused peers are in the log, and a flood does not fill it."""

from typing import Any

from structlog.testing import capture_logs

from kera.core.security.refusals import AGAIN_S, LINES_MAX, Refusals


def told(refusals: Refusals, *refused: tuple[str, str]) -> list[Any]:
    with capture_logs() as lines:
        for reason, peer in refused:
            refusals.tell(reason, peer)
    return [(line.get("peer"), line["reason"], line["untold"]) for line in lines]


def test_the_log_has_the_reason_the_interface_and_the_peer() -> None:
    with capture_logs() as lines:
        Refusals("frames").tell("it does not speak TLS", "10.0.0.9:4711")
    assert lines == [
        {
            "event": "connection refused",
            "log_level": "warning",
            "interface": "frames",
            "peer": "10.0.0.9:4711",
            "reason": "it does not speak TLS",
            "untold": 0,
        }
    ]


def test_repeated_refusals_of_a_host_are_counted_for_a_while() -> None:
    now_s = 0.0
    refusals = Refusals("frames", lambda: now_s)
    assert told(refusals, *[("expired", f"10.0.0.9:{port}") for port in range(1000)]) == [("10.0.0.9:0", "expired", 0)]
    assert told(refusals, ("expired", "10.0.0.8:1")) == [("10.0.0.8:1", "expired", 999)]
    assert told(refusals, ("no TLS", "10.0.0.9:1")) == [("10.0.0.9:1", "no TLS", 0)]
    now_s = AGAIN_S
    assert told(refusals, ("expired", "10.0.0.9:2")) == [("10.0.0.9:2", "expired", 0)]


def test_a_flood_from_many_hosts_is_logged_in_few_lines() -> None:
    now_s = 0.0
    refusals = Refusals("frames", lambda: now_s)
    for minute in range(3):
        now_s = minute * AGAIN_S
        flood = [("expired", f"10.0.{host // 256}.{host % 256}:1") for host in range(5000)]
        assert len(told(refusals, *flood)) == LINES_MAX
    now_s += AGAIN_S
    assert told(refusals, ("expired", "10.0.0.1:1")) == [("10.0.0.1:1", "expired", 5000 - LINES_MAX)]
