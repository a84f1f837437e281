"""`kera.client.Access` without asyncio: calls wait for their results. Made by `scripts.sync_sdk`."""

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

    Its methods do the same as those of `kera.client.Access`; the docstrings there name the errors.
    """

    def __init__(self, thread: LoopThread, access: AsyncAccess) -> None:
        self._thread = thread
        self._access = access

    def create_user(self, name: str, password: str | None = None, roles: Sequence[str] = ()) -> Change:
        """Make a user."""
        return self._thread.run(self._access.create_user(name, password, roles))

    def set_password(self, name: str, password: str | None) -> Change:
        """Give a user another password, or none; connections authenticated with the old one end."""
        return self._thread.run(self._access.set_password(name, password))

    def set_roles(self, name: str, roles: Sequence[str]) -> Change:
        """Give a user exactly these roles."""
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
        """Replace the quota of a user, see `Quota`; without any limits, the default quota applies."""
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
        """Set the quota of all users without their own quota, except super users; see `set_quota`."""
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
        """Return the quota of all users without their own quota, except super users."""
        return self._thread.run(self._access.default_quota())

    def delete_user(self, name: str) -> DeletedUser:
        """Delete a user, and revoke its tokens."""
        return self._thread.run(self._access.delete_user(name))

    def users(self) -> list[User]:
        """Return all users, by name."""
        return self._thread.run(self._access.users())

    def grant(self, principal: str, operations: Iterable[Operation], resource: str, *, deny: bool = False) -> Granted:
        """Let `principal` (``user:alice``, ``role:etl``, ``user:*``) do these operations on `resource`."""
        return self._thread.run(self._access.grant(principal, operations, resource, deny=deny))

    def revoke(
        self, principal: str, resource: str, operations: Iterable[Operation] = (), *, deny: bool = False
    ) -> Revoked:
        """Remove operations from the rule of `principal` about `resource`; if none are given, all of them."""
        return self._thread.run(self._access.revoke(principal, resource, operations, deny=deny))

    def revoke_rules(self, rule_ids: Iterable[int]) -> Revoked:
        """Remove rules."""
        return self._thread.run(self._access.revoke_rules(rule_ids))

    def rules(self, principal: str = "", resource: str = "") -> list[Rule]:
        """Return the rules that apply to a principal and a resource, if given; every user may see their own."""
        return self._thread.run(self._access.rules(principal, resource))

    def check(self, operation: Operation, resource: str, principal: str = "") -> Check:
        """Return whether a principal, by default the caller, may do an operation, and why."""
        return self._thread.run(self._access.check(operation, resource, principal))

    def issue_token(self, resources: Iterable[str] = (), *, lifetime_ms: int = 0) -> Token:
        """Issue a token with the caller's rights, restricted to `resources` if any are given."""
        return self._thread.run(self._access.issue_token(resources, lifetime_ms=lifetime_ms))

    def renew_token(self, token_id: str) -> RenewedToken:
        """Extend a token by its lifetime."""
        return self._thread.run(self._access.renew_token(token_id))

    def revoke_token(self, token_id: str) -> Change:
        """End a token now."""
        return self._thread.run(self._access.revoke_token(token_id))

    def tokens(self) -> list[Token]:
        """Return the caller's tokens; all tokens if the caller may administer the cluster."""
        return self._thread.run(self._access.tokens())
