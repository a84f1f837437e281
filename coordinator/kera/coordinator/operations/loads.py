"""The last measured load of streamlets, from the current launches of brokers. In memory only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kera.coordinator.cluster.membership import BrokerMembers
from kera.coordinator.ids import Launch, StreamletId
from kera.v1 import coordinator_pb2


class MeasuredLoads:
    """Bytes per second, appended and read, by launch and streamlet; and how busy the loop of a launch is."""

    def __init__(self, brokers: BrokerMembers) -> None:
        self._brokers = brokers
        self._loads: dict[Launch, dict[StreamletId, int]] = {}
        self._busy_ppm: dict[Launch, int] = {}

    def note(
        self, launch: Launch, loads: Iterable[coordinator_pb2.StreamletLoad], busy_permille: int | None = None
    ) -> None:
        """Note the loads of a launch's heartbeat.

        `busy_permille`: share of the time in which its loop was at work; None: not reported.
        """
        if busy_permille is None:
            self._busy_ppm.pop(launch, None)
        else:
            self._busy_ppm[launch] = min(busy_permille, 1000) * 1000
        self._loads[launch] = {
            StreamletId(one.stream_id, one.streamlet_id): one.bytes_per_s + one.read_bytes_per_s for one in loads
        }

    def of_launch(self, launch: Launch) -> Mapping[StreamletId, int]:
        """Return the reported loads of a launch; empty before its first heartbeat."""
        return self._loads.get(launch, {})

    def busy_ppm(self, launch: Launch) -> int | None:
        """Return the share of the time in which the loop of a launch was at work; None: not reported."""
        return self._busy_ppm.get(launch)

    def are_known(self, broker_id: int) -> bool:
        """Whether the current launch of a broker has sent a heartbeat, and so takes orders."""
        return Launch(broker_id, self._brokers.epoch(broker_id)) in self._loads

    def forget_earlier_launches(self) -> None:
        """Drop the reports of launches that are not current any more."""
        is_current = self._brokers.is_current
        self._loads = {launch: loads for launch, loads in self._loads.items() if is_current(launch)}
        self._busy_ppm = {launch: busy for launch, busy in self._busy_ppm.items() if is_current(launch)}
