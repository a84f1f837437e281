"""An event of the audit log, and the stream that a daemon may write such events into."""

from typing import Literal, NamedTuple, Protocol

from kera.core.base.health import Observation

Kind = Literal["authentication_failed", "denied", "changed"]


class AuditEvent(NamedTuple):
    """An event of the audit log. Unknown fields are empty."""

    kind: Kind
    principal: str = ""
    """The principal; for a failed authentication, the claimed one, as ``user:NAME``."""
    peer: str = ""
    """The address of the peer."""
    transport: str = ""
    operation: str = ""
    """The operation that the principal has attempted or completed."""
    resource: str = ""
    reason: str = ""
    """Why the operation was refused; for a change, the new content, as JSON."""


class AuditStream(Protocol):
    """The stream of events, besides the log. Runs in a ``with``."""

    def put(self, event: AuditEvent) -> None:
        """Write an event. Never waits."""
        ...

    def __enter__(self) -> object:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """End."""
        ...

    def look(self) -> Observation:
        """Return whether events can be written, for `Health.add`."""
        ...
