"""Users, rights, quotas and tokens that the user may see; all users may see their own rights."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from kera.client.admin.access import Rule, User
from kera.client.admin.quotas import NAMES, Quota
from kera.console import limits
from kera.console.pages.overview import allowed
from kera.console.visits import Visit
from kera.console.web.problems import Refused
from kera.console.web.words import number
from kera.core.base.sizes import format_size


async def show(visit: Visit) -> Response:
    """Show users, rules and rights."""
    if not visit.house.secured:
        raise Refused(
            404, "Security is off", "In this cluster everybody may do everything: there are no users and no rights."
        )
    access, me = visit.view.client.access, f"user:{visit.user}"
    # Check first whether the user is an administrator, because the cluster's audit log records each refusal.
    administers, mine, tokens = await asyncio.gather(
        access.check("administer", "cluster"), access.rules(me), access.tokens()
    )
    users: list[User] | None = None
    rules: list[Rule] | None = None
    default: Quota | None = None
    if administers.allowed:
        users, rules, default = await asyncio.gather(
            allowed(access.users()), allowed(access.rules()), allowed(access.default_quota())
        )
    return visit.page(
        "access.html",
        {
            "me": me,
            "users": None if users is None else users[: limits.ROWS_MAX],
            "users_left_out": max(0, len(users or ()) - limits.ROWS_MAX),
            "rules": None if rules is None else rules[: limits.ROWS_MAX],
            "rules_left_out": max(0, len(rules or ()) - limits.ROWS_MAX),
            "mine": mine[: limits.ROWS_MAX],
            "tokens": tokens[: limits.ROWS_MAX],
            "default_quota": None if default is None else in_words(default),
            "in_words": in_words,
        },
    )


def in_words(quota: Quota) -> str:
    """Describe the limits of a quota in one line; empty: there is no limit."""
    parts = []
    for name in NAMES:
        value = getattr(quota, name)
        if value is not None:
            what = name.removesuffix("_per_s").replace("_", " ")
            amount = format_size(value) if "bytes" in name else number(value)
            parts.append(f"{what} {amount}" + ("/s" if name.endswith("_per_s") else ""))
    return ", ".join(parts)
