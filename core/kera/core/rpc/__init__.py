"""Remote calls: one set of methods and handlers, two transports.

* ``method``: what a method, a call and a reply are; ``api``: the tables of KerA's methods.
* ``answer``: the future of a reply; ``limits``: bounds on messages and connections; ``handling``: how handlers are run.
* ``taking``: requests that a daemon takes from a connection's buffer, several at once.
* ``wire``: errors as messages, and the bulk (de)serialisers.
* ``frames`` / ``frame_server`` / ``frame_client``: length-prefixed frames over TCP and unix sockets, for the data plane
  between KerA's own parts.
* ``grpc_server`` / ``grpc_client``: the open interface.

Neither a handler nor a caller knows which transport a call uses. The handlers themselves belong to the daemons.
"""

import kera.core.base.silent_grpc  # noqa: F401 - before anything here imports gRPC
from kera.core.rpc.answer import Answer
from kera.core.rpc.method import Call, Channel, Handler, Method, Peer, Reply, Service

__all__ = ["Answer", "Call", "Channel", "Handler", "Method", "Peer", "Reply", "Service"]
