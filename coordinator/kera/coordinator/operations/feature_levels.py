"""The cluster's feature level (``kera.server.feature_level``): it rises when all coordinators and members have it.

The level is stored, and never falls, because the formats that it permits may be on disks by then. So a member or a
coordinator with a lower level is refused from then on. Members that are away count as well, since they come back;
members that are gone for good are forgotten (``forgetting``).
"""

from __future__ import annotations

from collections.abc import Callable

from kera.coordinator.cluster.feature_level import FEATURE_LEVEL_KEY, reached
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.store.ledger import number
from kera.coordinator.store.metadata import UnknownFormat
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument
from kera.server.feature_level import FEATURE_LEVEL

log = get_logger("kera.coordinator")


class FeatureLevels:
    """Raises the cluster's feature level when all daemons have it. The level never falls."""

    def __init__(self, state: State, of_coordinators: Callable[[], int]) -> None:
        """`of_coordinators` returns the lowest level of the coordinators that run."""
        self._state = state
        self._of_coordinators = of_coordinators
        self.work = Work()

    def load(self) -> None:
        """Raise `UnknownFormat` if this coordinator is too old for the stored level."""
        if (level := self._state.feature_level) > FEATURE_LEVEL:
            raise UnknownFormat(
                f"the cluster's feature level is {level}, and this coordinator's is {FEATURE_LEVEL}: its version is"
                " too old to lead; upgrade it",
                feature_level=level,
            )

    def advance(self) -> None:
        """Begin to raise the level, if all have a higher one."""
        if self._reached() > self._state.feature_level:
            self.work.start("raise", self._raise)

    async def require(self, level: int, what: str) -> None:
        """Raise the level to `level` at once, if all have it; `what` is possible from it on.

        Raises `InvalidArgument` if some do not have it.
        """
        if self._state.feature_level < level and self._reached() >= level:
            await self._raise()
        if self._state.feature_level < level:
            raise InvalidArgument(
                f"{what} from feature level {level} of the cluster on, and it has {self._state.feature_level}: a"
                " daemon has an earlier version, or feature_level_max keeps it low; kera cluster health shows the"
                " reason",
                feature_level=self._state.feature_level,
            )

    def _reached(self) -> int:
        state, settings = self._state, self._state.settings
        most = FEATURE_LEVEL if settings.feature_level_max is None else settings.feature_level_max
        members = [
            members.describe(member_id).feature_level
            for members in (state.brokers, state.backups)
            for member_id in members.ids()
        ]
        return reached(state.feature_level, min(FEATURE_LEVEL, most, self._of_coordinators()), members)

    async def _raise(self) -> None:
        state = self._state
        async with state.changing:
            before, level = state.feature_level, self._reached()
            if level > before:
                await state.write({FEATURE_LEVEL_KEY: number(level)})
                log.info("feature level raised", feature_level=level, before=before)
