"""How busy streamlets are, as the current launches of brokers measured it last. In memory only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kera.coordinator.cluster.membership import BrokerMembers
from kera.coordinator.ids import Launch, StreamletId
from kera.v1 import coordinator_pb2


class MeasuredLoads:
    """Bytes per second, appended and read, by launch and streamlet."""

    def __init__(self, brokers: BrokerMembers) -> None:
        self._brokers = brokers
        self._loads: dict[Launch, dict[StreamletId, int]] = {}

    def note(self, launch: Launch, loads: Iterable[coordinator_pb2.StreamletLoad]) -> None:
        """What a launch says in its heartbeat."""
        self._loads[launch] = {
            StreamletId(one.stream_id, one.streamlet_id): one.bytes_per_s + one.read_bytes_per_s for one in loads
        }

    def of_launch(self, launch: Launch) -> Mapping[StreamletId, int]:
        """What a launch said; nothing before its first heartbeat."""
        return self._loads.get(launch, {})

    def are_known(self, broker_id: int) -> bool:
        """Whether the current launch of a broker has sent a heartbeat, and so takes orders."""
        return Launch(broker_id, self._brokers.epoch(broker_id)) in self._loads

    def forget_earlier_launches(self) -> None:
        """Drop what launches said that are not current any more."""
        self._loads = {launch: loads for launch, loads in self._loads.items() if self._brokers.is_current(launch)}
