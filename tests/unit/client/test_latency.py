"""The SDK's calls about latency constraints. Tests against a real cluster are in tests/integration."""

from __future__ import annotations

from typing import Any

import pytest

from kera.client.admin.latency import Latency, LatencyConstraint
from kera.core.errors import InvalidArgument, Uncertain, UnknownLatencyConstraint
from kera.v1 import latency_pb2 as messages
from tests.unit.client.support import Asked

PATH = ["clicks", "group:enrich"]


def latency(answer: Any) -> tuple[Latency, Asked]:
    cluster = Asked(answer)
    return Latency(cluster), cluster  # type: ignore[arg-type]


def constraint(**fields: Any) -> messages.LatencyConstraint:
    return messages.LatencyConstraint(
        **{
            "name": "checkout",
            "path": PATH,
            "limit_us": 300_000,
            "window_ms": 15_000,
            "statistic": messages.LATENCY_STATISTIC_MEAN,
            **fields,
        }
    )


async def test_creating_a_constraint_sends_and_returns_all_of_its_fields() -> None:
    made, cluster = latency(messages.CreateLatencyConstraintResponse(constraint=constraint()))
    found = await made.create("checkout", PATH, 300)
    await made.create("checkout", PATH, 1.5, window_ms=60_000, statistic="p99")
    assert [each.constraint for each in cluster.requests] == [
        constraint(),
        constraint(limit_us=1_500, window_ms=60_000, statistic=messages.LATENCY_STATISTIC_P99),
    ]
    assert found == LatencyConstraint("checkout", ("clicks", "group:enrich"), 300.0, 15_000, "mean")


async def test_an_alteration_sends_only_the_given_fields() -> None:
    made, cluster = latency(messages.AlterLatencyConstraintResponse(constraint=constraint()))
    await made.alter("checkout", limit_ms=50)
    await made.alter("checkout", path=["clicks"], window_ms=1_000, statistic="mean")
    assert cluster.requests == [
        messages.AlterLatencyConstraintRequest(name="checkout", limit_us=50_000),
        messages.AlterLatencyConstraintRequest(
            name="checkout", path=["clicks"], window_ms=1_000, statistic=messages.LATENCY_STATISTIC_MEAN
        ),
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"limit_ms": 0}, r"limit_ms is 0, and takes a number of milliseconds from 1 to 3600000 \(1 h\)"),
        ({"limit_ms": -5}, "limit_ms is -5, and takes"),
        ({"limit_ms": 0.9}, "limit_ms is 0.9, and takes"),
        ({"limit_ms": 3_600_001}, "limit_ms is 3600001, and takes"),
        ({"limit_ms": 10**30}, f"limit_ms is {10**30}, and takes"),
        ({"limit_ms": 10**5_000}, "limit_ms is a int that is too long to be written, and takes"),
        ({"limit_ms": float("inf")}, "limit_ms is inf, and takes"),
        ({"limit_ms": True}, "limit_ms"),
        ({"limit_ms": "300ms"}, "limit_ms"),
        ({"limit_ms": float("nan")}, "limit_ms"),
        ({"window_ms": 0}, r"window_ms is 0, and takes a whole number from 1000 to 3600000 \(1 s to 1 h\)"),
        ({"window_ms": 1 << 32}, "window_ms is 4294967296, and takes a whole number"),
        ({"window_ms": -1}, "window_ms is -1, and takes"),
        ({"window_ms": 1_000.5}, "window_ms is 1000.5, and takes"),
        ({"statistic": "max"}, "statistic 'max' is not one of mean, p99"),
        ({"path": "clicks"}, "path"),
        ({"name": 7}, "name"),
    ],
)
async def test_an_invalid_constraint_is_refused_without_a_request(wrong: dict[str, Any], words: str) -> None:
    made, cluster = latency(None)
    with pytest.raises(InvalidArgument, match=words):
        await made.create(**{"name": "checkout", "path": PATH, "limit_ms": 300, **wrong})
    fields = {name: value for name, value in wrong.items() if name in {"limit_ms", "window_ms", "statistic"}}
    if fields:
        with pytest.raises(InvalidArgument, match=words):
            await made.alter("checkout", **fields)
    with pytest.raises(InvalidArgument, match="needs a stream at least"):
        await made.alter("checkout", path=[])
    assert cluster.requests == []


async def test_a_description_names_states_and_hops_in_words() -> None:
    hop = messages.HopDescription(
        stream="clicks", hop=messages.HOP_HAND_OVER, consumer_group="enrich", count=9, mean_us=5, violates=True
    )
    told = messages.LatencyDescription(
        constraint=constraint(), state=messages.LATENCY_STATE_VIOLATED, reason="why", mean_us=5, hops=[hop]
    )
    made, _ = latency(messages.DescribeLatencyConstraintResponse(description=told))
    found = await made.describe("checkout")
    assert (found.state, found.reason, found.mean_us) == ("violated", "why", 5)
    (shown,) = found.hops
    assert (shown.hop, shown.consumer_group, shown.chunks, shown.violates) == ("hand-over", "enrich", 9, True)
    newer = messages.LatencyDescription(constraint=constraint())
    newer.state = 99  # type: ignore[assignment]
    made, _ = latency(messages.ListLatencyConstraintsResponse(constraints=[newer]))
    assert [each.state for each in await made.constraints()] == ["unknown"]


async def test_a_retried_deletion_succeeds_only_after_an_unanswered_attempt() -> None:
    gone = UnknownLatencyConstraint("there is none")
    made, _ = latency(gone)
    with pytest.raises(UnknownLatencyConstraint):
        await made.delete("checkout")
    gone.__cause__ = Uncertain("no answer")
    await made.delete("checkout")
