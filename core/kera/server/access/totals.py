"""The error for a user that would exceed a total of its quota."""

from __future__ import annotations

from kera.core.access.identity import USER
from kera.core.errors import QuotaExceeded


def exceeded(principal: str, quota: str, value: int, has: str) -> QuotaExceeded:
    """Return the error; `quota`: its name in messages; `has`: in words, what the principal has."""
    user, flag = principal.removeprefix(USER), quota.replace("_", "-")
    return QuotaExceeded(
        f"{principal} {has}, and its quota of {quota.replace('_', ' ')} is {value}; an administrator can"
        f" raise it: kera quota set {user} --{flag} MORE",
        quota=quota,
        value=value,
        principal=principal,
    )
