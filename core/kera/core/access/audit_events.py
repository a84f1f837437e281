"""An event of the audit log, and the stream that a daemon may write such events into."""

from typing import Literal, NamedTuple, Protocol

from kera.core.base.health import Observation

Kind = Literal["authentication_failed", "denied", "changed"]


class AuditEvent(NamedTuple):
    """One of them. What is not known of it is empty."""

    kind: Kind
    principal: str = ""
    """The principal; for a failed authentication, the claimed one, as ``user:NAME``."""
    peer: str = ""
    """Its address."""
    transport: str = ""
    operation: str = ""
    """The operation that it attempted, or has completed."""
    resource: str = ""
    reason: str = ""
    """Why it was refused; of a change, what it was changed to, as JSON."""


class AuditStream(Protocol):
    """Where events go besides the log. Runs in a ``with``."""

    def put(self, event: AuditEvent) -> None:
        """One more. Never waits."""
        ...

    def __enter__(self) -> object:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """End."""
        ...

    def look(self) -> Observation:
        """How it goes."""
        ...
