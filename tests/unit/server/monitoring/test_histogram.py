"""Latencies in cumulative buckets."""

from prometheus_client.core import HistogramMetricFamily

from kera.server.monitoring.histogram import BOUNDS_S, LatencyHistogram


def test_each_bucket_counts_latencies_up_to_its_bound() -> None:
    histogram = LatencyHistogram()
    for seconds, count in ((0.0, 1), (BOUNDS_S[0], 2), (0.003, 3), (1000.0, 4)):
        histogram.observe(seconds, count)
    family = HistogramMetricFamily("seconds", "Seconds.", labels=["of"])
    histogram.add_to(family, ["a"])
    found = {
        sample.labels.get("le", sample.name): sample.value for sample in family.samples if sample.labels["of"] == "a"
    }

    assert found[str(BOUNDS_S[0])] == 3
    assert (found["0.0025"], found["0.005"], found["10.0"]) == (3, 6, 6)
    assert found["+Inf"] == found["seconds_count"] == 10
    assert found["seconds_sum"] == 2 * BOUNDS_S[0] + 3 * 0.003 + 4 * 1000
