"""Remote calls: one set of methods and handlers, two transports.

* ``method``: what a method, a call and a reply are; ``api``: the tables of KerA's methods.
* ``answer``: the future of a reply; ``limits``: what bounds a message and a connection; ``handling``: how handlers are
  run; ``address``: host and port.
* ``taking``: requests that a daemon takes from a connection's buffer, several at once.
* ``wire``: errors as messages, and the bulk (de)serialisers.
* ``frames`` / ``frame_server`` / ``frame_client``: length-prefixed frames over TCP and unix sockets, for the data plane
  between KerA's own parts.
* ``grpc_server`` / ``grpc_client``: the open interface.

A handler does not know by which transport a call came; a caller does not know by which one it goes. What handlers
decide is left to the daemons.
"""

import kera.core.base.silent_grpc  # noqa: F401 - before anything here imports gRPC
from kera.core.rpc.answer import Answer
from kera.core.rpc.method import Call, Channel, Handler, Method, Peer, Reply, Service

__all__ = ["Answer", "Call", "Channel", "Handler", "Method", "Peer", "Reply", "Service"]
