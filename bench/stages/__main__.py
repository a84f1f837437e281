"""The cost of each stage of a chunk's way: per request, per chunk and per byte, beside the machine's own speed.

The stages run one after the other in this process, each alone (`bench.stages.part`): the classes are the real ones, the
connections are not. So no cores have to be quiet, and the figures are reproducible. The processor time of the thread is
measured for each single request; the low quantile (`QUANTILE`) of many requests counts, in rounds spread over the whole
run: these requests were not disturbed. Everything is warm then: a broker that does something else between two requests,
or sleeps, pays more. Only the rows of the sockets include the kernel's work, and there the median counts: virtual
machines sometimes count too little for a thread that sleeps and is woken.

From requests of 1 to 16 chunks of 1 KiB to 1 MiB

    cost = per request + chunks x per chunk + bytes x per byte

is fitted by least squares of the relative errors, none of the three below 0; "error" is what remains, the root of the
mean square. The error of a difference of two stages is relative to the larger one. If all requests have one chunk, its
cost is part of the cost per request.

The limit of a stage is the work that its bytes need in any implementation: copying them, taking their checksum. Both
are measured in the same rounds, for the same sizes. The share is the limit's part of the stage's cost: per byte of the
fitted costs, else of requests of one chunk as they were measured. 100 % is the machine's maximum; somewhat more is
possible, as the target of a stage's copy may be warmer than that of the limit.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import uvloop

from bench.common import describe, directory, machine, parser, say
from bench.references import append_m_per_s, copy_s_per_gb, socket_mb_per_s
from bench.stages.backup import Replicas
from bench.stages.broker import Writes
from bench.stages.consuming import Pulls, Pushes
from bench.stages.costs import LOADS, costs_of, plain, quantile, record_table, reduced, table
from bench.stages.memory import Memory
from bench.stages.part import Part, Samples
from bench.stages.producing import Batches, Records
from bench.stages.sockets import Sockets


async def measure(root: Path, seconds: float) -> tuple[Samples, int]:
    """Run rounds of all parts in turn for `seconds`; returns the samples, and the number of rounds."""
    samples, passes = Samples(), -1
    async with contextlib.AsyncExitStack() as stack:
        parts: list[Part] = [Memory(LOADS)]
        parts += [stack.enter_context(Sockets.connected(kind, LOADS)) for kind in ("unix", "tcp")]
        parts += [Batches(LOADS), Records(LOADS), Replicas(LOADS), Pulls(LOADS)]
        broker = Writes(root, LOADS)
        stack.push_async_callback(broker.close)
        parts.append(broker)
        parts += [Pushes(LOADS, verify=verify) for verify in (True, False)]
        end_s = time.monotonic() + seconds
        while passes < 1 or time.monotonic() < end_s:
            for part in parts:
                for load in part.loads:
                    await part.rounds(load, samples)
            passes += 1
            if not passes:
                samples = Samples()  # caches, pages and connections were made: the first round does not count
    return samples, passes


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=60.0, help="for all rounds")
    made.add_argument("--out", type=Path, default=None, help="also write the figures there, as JSON")
    arguments = made.parse_args()
    with directory(arguments) as root:
        where = machine(root)
        samples, passes = uvloop.run(measure(root, arguments.seconds))
    references = {
        "copy_s_per_gb": min(copy_s_per_gb() for _ in range(3)),
        "socket_mb_per_s": max(socket_mb_per_s() for _ in range(3)),
        "append_m_per_s": max(append_m_per_s() for _ in range(3)),
    }
    say(f"{passes} passes")
    measured = reduced(samples)
    costs = costs_of(measured)
    records = {what: quantile(values) / 1000 for what, values in samples.records.items()}
    turn_us = quantile(samples.turns) / 1000
    print(f"## stages\n\n{describe(where)}; {passes} passes\n")
    print("\n".join(table(measured, costs)))
    print("\n".join(["", *record_table(records, references)]))
    print(
        f"\nWhole blocks (`bench.references`): copied in {references['copy_s_per_gb']:.4f} s/GB; through a unix socket"
        f" {references['socket_mb_per_s']:,.0f} MB/s. A turn of the event loop with nothing to do, of which stages that"
        f" wait have some: {turn_us:.1f} us."
    )
    found = {"bench": "stages", "machine": where, "passes": passes, "references": references, "turn_us": turn_us}
    text = json.dumps({**found, "records_us": records, "stages": plain(measured, costs)})
    print(f"\n{text}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
