"""`kera.client.Access` for those who write no asyncio. Written by ``python -m scripts.sync_sdk``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kera.client.admin.access import Access as AsyncAccess
from kera.client.admin.access import (
    Change,
    Check,
    DeletedUser,
    Granted,
    Operation,
    RenewedToken,
    Revoked,
    Rule,
    Token,
    User,
)
from kera.client.admin.quotas import Quota
from kera.client.sync.loop_thread import LoopThread


class Access:
    """Users, rules and tokens. Get it as `Client.access`.

    What each method promises and raises is in `kera.client.Access`.
    """

    def __init__(self, thread: LoopThread, access: AsyncAccess) -> None:
        self._thread = thread
        self._access = access

    def create_user(self, name: str, password: str | None = None, roles: Sequence[str] = ()) -> Change:
        """Make a user."""
        return self._thread.run(self._access.create_user(name, password, roles))

    def set_password(self, name: str, password: str | None) -> Change:
        """Give a user another password, or none; what was authenticated with the old one ends."""
        return self._thread.run(self._access.set_password(name, password))

    def set_roles(self, name: str, roles: Sequence[str]) -> Change:
        """Have a user be these roles, and no others."""
        return self._thread.run(self._access.set_roles(name, roles))

    def set_quota(
        self,
        name: str,
        *,
        bytes_in_per_s: int | None = None,
        bytes_out_per_s: int | None = None,
        requests_per_s: int | None = None,
        connections: int | None = None,
        streams: int | None = None,
        stored_bytes: int | None = None,
    ) -> Change:
        """Limit what a user may use, see `Quota`, by this and nothing else; without limits: by the default quota."""
        return self._thread.run(
            self._access.set_quota(
                name,
                bytes_in_per_s=bytes_in_per_s,
                bytes_out_per_s=bytes_out_per_s,
                requests_per_s=requests_per_s,
                connections=connections,
                streams=streams,
                stored_bytes=stored_bytes,
            )
        )

    def set_default_quota(
        self,
        *,
        bytes_in_per_s: int | None = None,
        bytes_out_per_s: int | None = None,
        requests_per_s: int | None = None,
        connections: int | None = None,
        streams: int | None = None,
        stored_bytes: int | None = None,
    ) -> Change:
        """The same of each user that has no quota of its own, and is not a super user."""
        return self._thread.run(
            self._access.set_default_quota(
                bytes_in_per_s=bytes_in_per_s,
                bytes_out_per_s=bytes_out_per_s,
                requests_per_s=requests_per_s,
                connections=connections,
                streams=streams,
                stored_bytes=stored_bytes,
            )
        )

    def default_quota(self) -> Quota:
        """The quota of each user that has none of its own, and is not a super user."""
        return self._thread.run(self._access.default_quota())

    def delete_user(self, name: str) -> DeletedUser:
        """Forget a user, and revoke its tokens."""
        return self._thread.run(self._access.delete_user(name))

    def users(self) -> list[User]:
        """All, by name."""
        return self._thread.run(self._access.users())

    def grant(self, principal: str, operations: Iterable[Operation], resource: str, *, deny: bool = False) -> Granted:
        """Let `principal` (``user:alice``, ``role:etl``, ``user:*``) do these things with `resource`."""
        return self._thread.run(self._access.grant(principal, operations, resource, deny=deny))

    def revoke(
        self, principal: str, resource: str, operations: Iterable[Operation] = (), *, deny: bool = False
    ) -> Revoked:
        """Take operations (none: all) away from the rule of `principal` about `resource`."""
        return self._thread.run(self._access.revoke(principal, resource, operations, deny=deny))

    def revoke_rules(self, rule_ids: Iterable[int]) -> Revoked:
        """Take rules away."""
        return self._thread.run(self._access.revoke_rules(rule_ids))

    def rules(self, principal: str = "", resource: str = "") -> list[Rule]:
        """The rules that count for a principal and a resource, as far as these are named; one's own all may see."""
        return self._thread.run(self._access.rules(principal, resource))

    def check(self, operation: Operation, resource: str, principal: str = "") -> Check:
        """Whether somebody may do something, and why; without `principal`: who asks."""
        return self._thread.run(self._access.check(operation, resource, principal))

    def issue_token(self, resources: Iterable[str] = (), *, lifetime_ms: int = 0) -> Token:
        """A token with the rights of who asks, narrowed to `resources` if any are named; 0 ms: as long as may be."""
        return self._thread.run(self._access.issue_token(resources, lifetime_ms=lifetime_ms))

    def renew_token(self, token_id: str) -> RenewedToken:
        """Have a token be good for as long again."""
        return self._thread.run(self._access.renew_token(token_id))

    def revoke_token(self, token_id: str) -> Change:
        """End a token now."""
        return self._thread.run(self._access.revoke_token(token_id))

    def tokens(self) -> list[Token]:
        """One's own; all, for who administers the cluster."""
        return self._thread.run(self._access.tokens())
