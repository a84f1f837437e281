"""Which records a query or a micro-batch takes, and how they are cut into partitions. Pure: no connection, no clock,
no type of Spark, so that another engine can use it through a service.

``survey`` brings the facts about the cluster, as `Now`. If a decision needs answers of brokers, it has two functions:
the first returns the questions, the second decides.

    a batch        questions ─(locate)─► resolve ─► start, end ─► ranges ─► to_ask ─(segments)─► cut

    a micro-batch  next_ends ─► [cap] ─► waiting ─► admission.decide ─(locate)─► limited ─► conclude ─► the checkpoint
                   revise(start, end) ─► ranges ─► to_ask ─(segments)─► cut

    with epochs    begin ─► the first offset        next_ends ─► next_epochs ─► conclude ─► the checkpoint
                   revise ─► divided ─► ranges, cut, where each row tells its epoch

    real-time      next_ends ─► tails ─(tasks)─► moved ─► conclude ─► the checkpoint

Invariants:

* a micro-batch never ends before its start, in any entry;
* the same two offsets from the checkpoint give the same records, or an error, whenever they are planned;
* partitions cover the records between start and end exactly once, and each is at one broker.
"""

from kera.spark_connector.planning.advancing import (
    Advance,
    Planned,
    cap,
    conclude,
    limited,
    next_ends,
    revise,
    waiting,
)
from kera.spark_connector.planning.cutting import Cutting, EntryRange, Piece, cut, ranges, to_ask
from kera.spark_connector.planning.lag import behind_latest
from kera.spark_connector.planning.now import Now, StreamNow, find_bounds, heads
from kera.spark_connector.planning.real_time import Tail, moved, rounded, stopped, tails
from kera.spark_connector.planning.resolving import Question, questions, resolve

__all__ = [
    "Advance",
    "Cutting",
    "EntryRange",
    "Now",
    "Piece",
    "Planned",
    "Question",
    "StreamNow",
    "Tail",
    "behind_latest",
    "cap",
    "conclude",
    "cut",
    "find_bounds",
    "heads",
    "limited",
    "moved",
    "next_ends",
    "questions",
    "ranges",
    "resolve",
    "revise",
    "rounded",
    "stopped",
    "tails",
    "to_ask",
    "waiting",
]
