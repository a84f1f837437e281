"""The columns of typed streams in the registry: see ``kera.coordinator.cluster.column_schemas``."""

from __future__ import annotations

import base64
from collections.abc import Callable

from kera.coordinator.cluster.column_schemas import NOTHING, Registration
from kera.coordinator.cluster.keys import LAST_SCHEMA_ID
from kera.coordinator.cluster.state import State
from kera.coordinator.schemas.bookkeeping import Change, Registry
from kera.coordinator.schemas.checking import Checking, incompatible
from kera.coordinator.schemas.records import changes_of
from kera.coordinator.store.ledger import number
from kera.coordinator.store.metadata_copy import RESTORED
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, InvalidSchema, QuotaExceeded, Unavailable
from kera.core.schemas import SchemaType
from kera.server.schemas.compatibility import Definition
from kera.v1 import schema_pb2 as messages

log = get_logger("kera.coordinator")


class TypedStreams:
    """Keeps the columns of typed streams as versions of their subjects in the registry."""

    def __init__(
        self,
        state: State,
        registry: Callable[[], Registry],
        checking: Checking,
        caller: Callable[[], str],
        check_share: Callable[[Change], None],
    ) -> None:
        self._state = state
        self._check_share = check_share
        self._registry = registry
        self._checking = checking
        self._caller = caller

    async def compare(self, stream: str, arrow_schema: bytes) -> object:
        """See `ColumnSchemas.compare`. None: the registry does not take it."""
        subject, registry = _subject(stream), self._registry()
        if self._state.ledger.get(RESTORED) is not None:
            log.warning("columns of a stream are not registered: the metadata are catching up", stream=stream)
            return None
        definition = Definition(SchemaType.ARROW, _text(arrow_schema))
        basis = registry.basis(subject)
        try:
            versions = registry.versions(basis)
            found = await self._checking.incompatibilities(definition, versions, basis.compatibility)
        except InvalidSchema as error:
            log.warning("columns of a stream are not registered", stream=stream, error=error.message)
            return None
        if found:
            raise incompatible(subject, found)
        return basis

    def register(self, stream: str, arrow_schema: bytes, compared: object) -> Registration:
        """See `ColumnSchemas.register`."""
        subject, registry, ledger = _subject(stream), self._registry(), self._state.ledger
        if compared is None:
            return NOTHING
        schema = messages.SchemaDefinition(type=SchemaType.ARROW.wire, definition=_text(arrow_schema))
        if registry.find(subject, schema) is not None:
            return NOTHING
        if registry.basis(subject) != compared:
            raise Unavailable(f"others have changed {subject} meanwhile; ask again", subject=subject)
        new_id = ledger.next_number(LAST_SCHEMA_ID)
        now_us = self._state.clock.now_us()
        try:
            change = registry.registered(subject, schema, new_id=new_id, by=self._caller(), now_us=now_us)
            self._check_share(change)
        except (InvalidArgument, QuotaExceeded) as error:
            log.warning("columns of a stream are not registered", stream=stream, error=error.message)
            return NOTHING
        more = {LAST_SCHEMA_ID: number(new_id)} if change.schemas else {}
        return self._registration(change, more)

    def forget(self, stream: str) -> Registration:
        """See `ColumnSchemas.forget`. A subject with other schemas than Arrow's is not the stream's own, and stays."""
        subject, registry = _subject(stream), self._registry()
        if registry.kinds(subject) != {SchemaType.ARROW}:
            return NOTHING
        return self._registration(registry.without(subject, 0), {})

    def _registration(self, change: Change, more: dict[str, bytes]) -> Registration:
        return Registration({**changes_of(change), **more}, lambda: self._registry().apply(change))


def _subject(stream: str) -> str:
    return f"{stream}-value"


def _text(arrow_schema: bytes) -> str:
    return base64.b64encode(arrow_schema).decode()
