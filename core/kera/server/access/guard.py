"""The guard in front of a daemon's services: authenticates callers, and refuses operations without a right.

It remembers allowed operations until users or rules change (``acquaintances``). An identity that loses a right then
loses its connections, and the requests in progress over them; it may reconnect, and use its remaining rights.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, Self

from kera.core.access.accounts import Accounts
from kera.core.access.identity import CHANGED, Identity, not_authenticated
from kera.core.access.rights import CLUSTER, Operation
from kera.core.base.crowd import host_of
from kera.core.base.health import Observation
from kera.core.base.telemetry import get_logger
from kera.core.errors import AuthenticationFailed, NotAllowed, StaleEpoch, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Call, Doorkeeper, Evidence, Handler, Method, Peer, Reply, Service
from kera.core.rpc.taking import NOTHING, Asker, Taken, Taker
from kera.server.access.acquaintances import Acquaintance, Acquaintances
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.pacing import paced, paced_taker
from kera.server.access.requirements import CHANGES, REQUIREMENTS, May, Need, Requirement, Who, stream
from kera.server.access.usage import Usages
from kera.v1 import access_pb2 as messages

log = get_logger("kera.access")

NameOf = Callable[[int], str | None]
"""Returns the name of the stream with an id; None: this daemon does not have it."""
CALLER: ContextVar[Peer | None] = ContextVar("caller", default=None)
"""The peer whose request is being handled; None: the daemon acts on its own."""
FAILED_S = 0.1
"""Delay of the answer to a failed authentication."""
FAILURES_MAX = 3
"""Failed authentications after which a connection of frames is closed."""
_FAILURES = "failed authentications"
LOOK_S = 1.0
"""Time between two checks whether identities are still valid."""


class Beside(Protocol):
    """A component that a guard needs, and that runs while the guard does."""

    def __enter__(self) -> object:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """End."""
        ...

    def look(self) -> Observation:
        """Return how it is doing, for the daemon's health."""
        ...


class Door:
    """The access check in front of a daemon's services. This one is open: every peer may do everything."""

    looks: Mapping[str, Callable[[], Observation]] = MappingProxyType({})
    """Checks of its components by their names, for the daemon's health."""

    @property
    def asks(self) -> bool:
        """Whether callers have to authenticate."""
        return False

    @property
    def doorkeeper(self) -> Doorkeeper | None:
        """The doorkeeper for transports; None: they admit every peer."""
        return None

    @property
    def version(self) -> int:
        """Version of the users and rules in force."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def service(self) -> Service:
        """Return the methods to authenticate: none here."""
        return {}

    def guarded(self, service: Service) -> Service:
        """Return `service` unchanged."""
        return service

    def may_watch(self, evidence: Evidence) -> bool:
        """Return whether a client may see metrics and health. Raises `AuthenticationFailed` for invalid evidence."""
        del evidence
        return True

    def taker(self, taker: Taker, *, of_daemons: bool) -> Taker:
        """Return `taker` unchanged."""
        del of_daemons
        return taker


class Guard(Door):
    """Authenticates the callers of a daemon, and refuses requests beyond their rights.

    Belongs to an event loop; within a ``with``, it ends connections whose identities are no longer valid.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        audit: Audit,
        *,
        name_of: NameOf = lambda _: None,
        unknown: Callable[[int], UnknownStream] | None = None,
        look_s: float = LOOK_S,
        beside: Mapping[str, Beside] = MappingProxyType({}),
    ) -> None:
        """`unknown`: returns the error for an unknown stream id; `beside`: components that run with the guard."""
        self._unknown = unknown or _unknown
        self.authenticator = authenticator
        self.audit = audit
        self._name_of = name_of
        self._look_s = look_s
        self.usages = Usages(self.quota_of)
        self.known = Acquaintances(self.usages)
        self._looking: asyncio.TimerHandle | None = None
        self._beside = beside
        self._stack = ExitStack()
        self.looks = {name: each.look for name, each in beside.items()}
        if authenticator.cluster_secret is not None:
            self.looks["cluster_secret"] = authenticator.cluster_secret.look
        self._secret_changes = 0

    def __enter__(self) -> Self:
        for each in self._beside.values():
            self._stack.enter_context(each)
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._looking is not None:
            self._looking.cancel()

    @property
    def asks(self) -> bool:
        """See `Door.asks`."""
        return True

    @property
    def doorkeeper(self) -> Doorkeeper | None:
        """See `Door.doorkeeper`."""
        return self

    @property
    def version(self) -> int:
        """Version of the users and rules in force."""
        return self.authenticator.accounts.version

    # -- authentication --------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        """See `Doorkeeper.admit`. Raises `QuotaExceeded`, too."""
        who = self._who(evidence, peer.address, peer.transport)
        if who is not None:
            self.known.meet(peer, who)

    def may_watch(self, evidence: Evidence) -> bool:
        """See `Door.may_watch`."""
        who = self._who(evidence, "", "http")
        # A daemon without users and rules, such as a standby coordinator, has no metrics of streams to hide.
        if who is None or not self.authenticator.is_told:
            return who is not None
        return self.may(who, Operation.DESCRIBE, CLUSTER)

    def _who(self, evidence: Evidence, address: str, transport: str) -> Identity | None:
        door = self.authenticator
        try:
            if evidence.token:
                return door.of_token(evidence.token)
            if evidence.user_id is not None:
                return door.of_process(evidence.user_id)
            return door.of_certificate(evidence.certificate) if evidence.certificate else None
        except AuthenticationFailed as error:
            if not error.attributes.get("session_ended"):
                self.audit.authentication_failed(address, transport, error.message)
            raise

    async def _authenticate(self, call: Call[messages.AuthenticateRequest]) -> Reply[messages.AuthenticateResponse]:
        request, peer, door = call.message, call.peer, self.authenticator
        answer = messages.AuthenticateResponse()
        try:
            if request.WhichOneof("with") == "token":
                who = door.of_token(request.token)
            elif request.WhichOneof("with") is None:
                raise AuthenticationFailed("the request has no credentials: set token or scram")
            elif not request.exchange_id:
                host = host_of(peer.address)
                answer.exchange_id, answer.scram = door.begin_login(request.scram, peer.transport, host)
                return Reply(answer)
            else:
                who, answer.scram = door.end_login(request.exchange_id, request.scram, peer.transport)
            if peer.asked and peer.identity not in {None, who}:  # else its requests in progress would escape revocation
                raise AuthenticationFailed(
                    "another identity has authenticated on this connection: use another connection"
                )
        except AuthenticationFailed as error:
            user = str(error.attributes.get("user", ""))
            self.audit.authentication_failed(peer.address, peer.transport, error.message, user=user)
            await self._fail(peer)
            raise
        answer.principal = who.principal
        if peer.transport == "grpc":
            answer.session, for_s = door.session_for(who)
            answer.expires_in_ms = max(1, int(for_s * 1000))
        else:
            self.known.meet(peer, who)
        return Reply(answer)

    async def _fail(self, peer: Peer) -> None:
        """Delay a peer that guesses, and disconnect it after several failures."""
        failures = peer.state[_FAILURES] = peer.state.get(_FAILURES, 0) + 1
        await asyncio.sleep(FAILED_S)
        if failures > FAILURES_MAX:
            peer.end()

    # -- rights ----------------------------------------------------------------------------------------------------

    def may(self, who: Identity, operation: Operation, resource: str) -> bool:
        """Return whether an identity may carry out an operation; nothing is remembered or logged."""
        return self.authenticator.accounts.rights.decide(who, operation, resource).allowed

    def quota_of(self, who: Identity) -> messages.Quota:
        """Return the quota of a user."""
        return self.authenticator.accounts.quota_of(who.user, is_super=who.is_super)

    def allows(self, peer: Peer, operation: Operation, resource: str) -> bool:
        """Return whether a peer may carry out an operation; if so, its connection ends when it loses that right."""
        who = peer.identity
        if who is None or not self.may(who, operation, resource):
            return False
        self.known.allow(peer.remembered or self.known.of(who), Need(operation, resource), resource)
        return True

    def check(self, peer: Peer, need: Need) -> None:
        """Raise `NotAllowed` if a peer lacks a right, or `UnknownStream` if it may not know that the stream exists."""
        who = peer.identity
        if who is None:
            raise _nobody(peer)
        known: Acquaintance = peer.remembered or self.known.of(who)
        if need in known.allowed:
            return
        operation, wanted = need
        if isinstance(wanted, int):
            name = self._name_of(wanted)
            if name is None:
                raise self._unknown(wanted)
            resource = stream(name)
        else:
            resource = wanted
        decision = self.authenticator.accounts.rights.decide(who, operation, resource)
        if decision.allowed:
            self.known.allow(known, need, resource)
            return
        self.audit.denied_to(who.principal, peer.address, operation.word, resource, decision.reason)
        kind, _, name = resource.partition(":")
        if kind == "stream" and operation is not Operation.CREATE and not self.may(who, Operation.DESCRIBE, resource):
            if isinstance(wanted, int):
                raise self._unknown(wanted)
            raise UnknownStream(f"there is no stream {name!r}", stream=name)
        raise NotAllowed(
            f"{who.principal} may not {operation.word} {resource}: {decision.reason}; an administrator of the"
            f" cluster can allow it: kera acl grant {who.principal} {operation.word} {resource}",
            principal=who.principal,
            operation=operation.word,
            resource=resource,
        )

    # -- services --------------------------------------------------------------------------------------------------

    def service(self) -> Service:
        """Return the guard's own methods."""
        return {api.AUTHENTICATE: self._authenticate, api.APPLY_ACCESS: self._answer_apply}

    def guarded(self, service: Service) -> Service:
        """Return `service` behind checks of rights. Raises `KeyError` for a method without a requirement."""
        return {method: self._guarded(method, handler) for method, handler in service.items()}

    def taker(self, taker: Taker, *, of_daemons: bool) -> Taker:
        """Return `taker` for daemons only, or for all who have authenticated; it has to check rights itself."""
        served = taker if of_daemons else paced_taker(taker)

        def take(asker: Asker, frames: memoryview, requests_max: int) -> Taken:
            peer = asker.peer
            who = peer.identity
            if who is None or (of_daemons and not who.is_daemon):
                return NOTHING  # the handler raises the error
            peer.asked = True
            return served(asker, frames, requests_max)

        return take

    def _guarded(self, method: Method[Any, Any], handler: Handler) -> Handler:
        requirement = REQUIREMENTS[method]
        if requirement.who is Who.ANYBODY:
            return handler

        def serve(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            peer = call.peer
            who = peer.identity
            if who is None:
                raise _nobody(peer)
            peer.asked = True
            if not who.is_daemon:
                if not self.authenticator.is_told:
                    raise self.authenticator.not_told()
                self._check_all(peer, who, method, requirement, call.message)
            result = handler(call)
            if method in CHANGES:
                return self._audited(result, call, method, who)
            if requirement.narrow is None or who.is_daemon:
                return result
            return _narrowed(result, requirement.narrow, partial(self.may, who))

        return serve if requirement.who is Who.DAEMONS else paced(method, serve)

    def _check_all(
        self, peer: Peer, who: Identity, method: Method[Any, Any], requirement: Requirement, message: Any
    ) -> None:
        if requirement.who is Who.DAEMONS:
            self.audit.denied_to(who.principal, peer.address, method.name, "cluster", "it is not a daemon")
            raise NotAllowed(
                f"{method.name} serves daemons of the cluster only, and {who.principal} is not a daemon",
                principal=who.principal,
                operation=method.name,
                resource="cluster",
            )
        allowed = peer.remembered.allowed if peer.remembered is not None else ()
        for need in requirement.needs(message):
            if need in allowed:
                continue
            if requirement.each and isinstance(need.resource, int) and self._name_of(need.resource) is None:
                continue
            self.check(peer, need)

    async def _audited(
        self, result: Reply[Any] | Awaitable[Reply[Any]], call: Call[Any], method: Method[Any, Any], who: Identity
    ) -> Reply[Any]:
        """Wait for the reply, and then report the change to the audit."""
        address, message = call.peer.address, call.message
        reply = await result if inspect.isawaitable(result) else result
        about = next(iter(REQUIREMENTS[method].needs(message)), Need(Operation.ADMINISTER, CLUSTER)).resource
        if isinstance(about, int):
            name = self._name_of(about)
            about = f"stream id {about}" if name is None else stream(name)
        self.audit.done_by(who.principal, address, method.name, about)
        return reply

    # -- changes ---------------------------------------------------------------------------------------------------

    async def _answer_apply(self, call: Call[messages.ApplyAccessRequest]) -> Reply[messages.ApplyAccessResponse]:
        self.apply(call.message.table, call.message.coordinator_epoch)
        return Reply(messages.ApplyAccessResponse(version=self.version))

    def apply(self, table: messages.AccessTable, coordinator_epoch: int) -> None:
        """Replace the users and rules. Raises `StaleEpoch` for those of an earlier coordinator."""
        known = self.authenticator.accounts
        if coordinator_epoch < known.coordinator_epoch:
            raise StaleEpoch(
                f"the users and rules come from a coordinator of epoch {known.coordinator_epoch};"
                f" {coordinator_epoch} is older",
                coordinator_epoch=known.coordinator_epoch,
            )
        if coordinator_epoch == known.coordinator_epoch and table.version < known.version:
            return  # a later table has arrived before
        self.authenticator.accounts = Accounts(table, coordinator_epoch, self.authenticator.now_s())
        ended = self.known.end(self._lost, CALLER.get())  # the caller that made the change still gets its answer
        self.usages.apply()
        log.info("users and rules have changed", version=table.version, connections_ended=ended)

    def _lost(self, who: Identity, known: Acquaintance) -> str:
        keeps = all(self.may(who, operation, resource) for operation, resource in known.resources)
        return self.authenticator.why_ended(who) or ("" if keeps else CHANGED)

    def _look(self) -> None:
        """End connections whose identities have expired, or whose cluster secret was removed."""
        secret = self.authenticator.cluster_secret
        changes = self._secret_changes if secret is None else secret.changes
        if self.known.is_over(self.authenticator.now_s()) or changes != self._secret_changes:
            self._secret_changes = changes
            self.known.end(lambda who, _: self.authenticator.why_ended(who))
        self._looking = asyncio.get_running_loop().call_later(self._look_s, self._look)


async def _narrowed(
    result: Reply[Any] | Awaitable[Reply[Any]], narrow: Callable[[Any, May], None], may: May
) -> Reply[Any]:
    reply = await result if inspect.isawaitable(result) else result
    narrow(reply.message, may)
    return reply


def _unknown(stream_id: int) -> UnknownStream:
    return UnknownStream(f"there is no stream with id {stream_id}", stream_id=stream_id)


def check_caller() -> None:
    """Raise `AuthenticationFailed` if the caller of the present request has lost its connection while it waited."""
    peer = CALLER.get()
    if peer is not None and peer.dismissed:
        raise _nobody(peer)


def _nobody(peer: Peer) -> AuthenticationFailed:
    return AuthenticationFailed(peer.dismissed) if peer.dismissed else not_authenticated()
