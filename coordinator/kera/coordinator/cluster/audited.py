"""Says who makes which change: in the audit, or in the log of a cluster without security.

A change is said before it is written: this process may end right after the write, and no change that happened may be
missing. If the write fails, the change is said again with the error as `failed`. Then nothing has changed, or, after an
error of the store that leaves it open, nobody knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kera.server.access.guard import CALLER, Guard


@contextlib.contextmanager
def audited(guard: Guard | None, log: Any, what: str, **fields: object) -> Iterator[None]:
    """Say a change of the current caller, around its write.

    `log`: where to say it in a cluster without security; None: nowhere.
    """
    _say(guard, log, what, fields)
    try:
        yield
    except Exception as error:
        _say(guard, log, what, {**fields, "failed": str(error)})
        raise


def _say(guard: Guard | None, log: Any, what: str, fields: dict[str, object]) -> None:
    peer = CALLER.get()
    if guard is not None:
        principal = "" if peer is None or peer.identity is None else peer.identity.principal
        guard.audit.changed_by(principal, "" if peer is None else peer.address, what, **fields)
    elif log is not None:
        log.info(what, **fields)
