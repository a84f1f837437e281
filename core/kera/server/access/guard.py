"""The guard in front of what a daemon serves: finds out who asks, and refuses what is not allowed.

What somebody was allowed is remembered until users or rules change (``acquaintances``). Then who has lost anything of
it loses its connections, and with them what is under way over them; it may come back, and do what it still may.
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
"""The name of the stream with an id; None: there is none here."""
CALLER: ContextVar[Peer | None] = ContextVar("caller", default=None)
"""The peer whose request is being handled; None: the daemon acts by itself."""
FAILED_S = 0.1
"""After which who has shown nothing that is good is told so."""
FAILURES_MAX = 3
"""Failed authentications after which a connection of frames is closed."""
_FAILURES = "failed authentications"
LOOK_S = 1.0
"""Between two looks whether identities are still good."""


class Beside(Protocol):
    """Something that a guard needs, and that runs while it does."""

    def __enter__(self) -> object:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """End."""
        ...

    def look(self) -> Observation:
        """How it goes."""
        ...


class Door:
    """The access check in front of a daemon's services. This one is open: every peer may do everything."""

    looks: Mapping[str, Callable[[], Observation]] = MappingProxyType({})
    """How what it needs goes, for the daemon's health, by what it is."""

    @property
    def asks(self) -> bool:
        """Whether it is not open."""
        return False

    @property
    def doorkeeper(self) -> Doorkeeper | None:
        """For transports."""
        return None

    @property
    def version(self) -> int:
        """Version of the users and rules in force."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing has begun."""

    def service(self) -> Service:
        """Nobody has to authenticate."""
        return {}

    def guarded(self, service: Service) -> Service:
        """`service` as it is."""
        return service

    def may_watch(self, evidence: Evidence) -> bool:
        """Whether somebody may see metrics and health. Raises `AuthenticationFailed` for what is invalid."""
        del evidence
        return True

    def taker(self, taker: Taker, *, of_daemons: bool) -> Taker:
        """`taker` as it is."""
        del of_daemons
        return taker


class Guard(Door):
    """Authenticates the callers of a daemon, and refuses requests beyond their rights.

    Belongs to an event loop; in a ``with``, what is good no more is ended.
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
        """`unknown`: the error for the id of a stream that is not here; `beside`: what has to run meanwhile."""
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
        """For transports."""
        return self

    @property
    def version(self) -> int:
        """Version of the users and rules in force."""
        return self.authenticator.accounts.version

    # -- who asks --------------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        """See `Doorkeeper.admit`. Raises `QuotaExceeded`, too."""
        who = self._who(evidence, peer.address, peer.transport)
        if who is not None:
            self.known.meet(peer, who)

    def may_watch(self, evidence: Evidence) -> bool:
        """See `Door.may_watch`."""
        who = self._who(evidence, "", "http")
        if who is None or not self.authenticator.is_told:  # a coordinator that stands by has nothing to tell of streams
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
            if peer.asked and peer.identity not in {None, who}:  # what is under way would be nobody's to take away
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
        """Delay a peer that guesses, and disconnect it now and then."""
        failures = peer.state[_FAILURES] = peer.state.get(_FAILURES, 0) + 1
        await asyncio.sleep(FAILED_S)
        if failures > FAILURES_MAX:
            peer.end()

    # -- what it may do --------------------------------------------------------------------------------------------

    def may(self, who: Identity, operation: Operation, resource: str) -> bool:
        """Whether somebody may do something; nothing follows from it."""
        return self.authenticator.accounts.rights.decide(who, operation, resource).allowed

    def quota_of(self, who: Identity) -> messages.Quota:
        """The quota of a user."""
        return self.authenticator.accounts.quota_of(who.user, is_super=who.is_super)

    def allows(self, peer: Peer, operation: Operation, resource: str) -> bool:
        """Whether a peer may do something, as long as it is here: it is ended when that is taken away."""
        who = peer.identity
        if who is None or not self.may(who, operation, resource):
            return False
        self.known.allow(peer.remembered or self.known.of(who), Need(operation, resource), resource)
        return True

    def check(self, peer: Peer, need: Need) -> None:
        """Raises `NotAllowed`, or `UnknownStream` if who asks may not even know that it is there."""
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

    # -- around what is served -------------------------------------------------------------------------------------

    def service(self) -> Service:
        """The guard's own methods."""
        return {api.AUTHENTICATE: self._authenticate, api.APPLY_ACCESS: self._answer_apply}

    def guarded(self, service: Service) -> Service:
        """`service`, as far as who asks may. Raises `KeyError` for a method of which it is not known who may."""
        return {method: self._guarded(method, handler) for method, handler in service.items()}

    def taker(self, taker: Taker, *, of_daemons: bool) -> Taker:
        """`taker`, for daemons only, or for whoever has authenticated: what that may is for the taker to find out."""
        served = taker if of_daemons else paced_taker(taker)

        def take(asker: Asker, frames: memoryview, requests_max: int) -> Taken:
            peer = asker.peer
            who = peer.identity
            if who is None or (of_daemons and not who.is_daemon):
                return NOTHING  # the handler says why
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
        """Write down what was done, once it is."""
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
        """Have other users and rules hold from now on. Raises `StaleEpoch` for those of an earlier coordinator."""
        known = self.authenticator.accounts
        if coordinator_epoch < known.coordinator_epoch:
            raise StaleEpoch(
                f"the users and rules come from a coordinator of epoch {known.coordinator_epoch};"
                f" {coordinator_epoch} is older",
                coordinator_epoch=known.coordinator_epoch,
            )
        if coordinator_epoch == known.coordinator_epoch and table.version < known.version:
            return  # overtaken by a later one
        self.authenticator.accounts = Accounts(table, coordinator_epoch, self.authenticator.now_s())
        ended = self.known.end(self._lost, CALLER.get())  # that one has changed it, and is answered
        self.usages.apply()
        log.info("users and rules have changed", version=table.version, connections_ended=ended)

    def _lost(self, who: Identity, known: Acquaintance) -> str:
        keeps = all(self.may(who, operation, resource) for operation, resource in known.resources)
        return self.authenticator.why_ended(who) or ("" if keeps else CHANGED)

    def _look(self) -> None:
        """End what is good no more, as its time is up, or the secret is gone that was shown."""
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
    """Raises `AuthenticationFailed` if who has asked for what is done has lost it meanwhile, while it waited."""
    peer = CALLER.get()
    if peer is not None and peer.dismissed:
        raise _nobody(peer)


def _nobody(peer: Peer) -> AuthenticationFailed:
    return AuthenticationFailed(peer.dismissed) if peer.dismissed else not_authenticated()
