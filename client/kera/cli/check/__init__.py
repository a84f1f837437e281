"""``kera check``: checks whether a live cluster keeps its promises under load, while commands kill parts of it.

`_workload` has the clients, `_kills` runs the commands, `_run` the steps of a check, and `_report` prints the outcome.
`kera.client.checking.ledger` records all observations and judges them.
"""

from __future__ import annotations

import logging
import os
import traceback

import typer

from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._output import OUTPUT_OPTION, Output, rendered
from kera.cli._run import UsageError, run_async
from kera.cli._streams import fail, show
from kera.core.base.process import raise_descriptor_limit
from kera.core.errors import KeraError

EXIT_NOT_CHECKED = 2


def check(
    minutes: float | None = typer.Option(None, "--minutes", metavar="N", help="Duration of the load."),
    seconds: float | None = typer.Option(None, "--seconds", metavar="N", help="Likewise, in seconds. Default: 60."),
    kill: list[str] = typer.Option(
        [],
        "--kill",
        metavar="COMMAND",
        help="Shell command to repeat during the load; several run one after the other.",
    ),
    kill_every: float | None = typer.Option(
        None, "--kill-every", metavar="SECONDS", help="How often --kill is run. Default: 30."
    ),
    stream: str | None = typer.Option(
        None, "--stream", metavar="NAME", help="An existing, empty stream. Default: the check creates one."
    ),
    streamlets: int | None = typer.Option(
        None, "--streamlets", metavar="N", help="Streamlets of its stream. Default: 4."
    ),
    entries: int | None = typer.Option(None, "--entries", metavar="N", help="Entries of each streamlet. Default: 1."),
    replication: int | None = typer.Option(
        None, "--replication", min=0, metavar="N", help="Backups per record. Default: the cluster's."
    ),
    durability: str | None = typer.Option(
        None, "--durability", metavar="LEVEL", help="leader, replicated or persisted. Default: as for any stream."
    ),
    producers: int = typer.Option(2, "--producers", min=1, max=1000, metavar="N", help="Number of producers."),
    readers: int = typer.Option(
        2,
        "--readers",
        min=0,
        max=1000,
        metavar="N",
        help="Number of readers; every other one reads in the brokers' memory.",
    ),
    members: int = typer.Option(
        2, "--members", min=0, max=1000, metavar="N", help="Number of consumers of a consumer group."
    ),
    rate: float = typer.Option(1000.0, "--rate", metavar="N", help="Records a second, all producers together."),
    record_bytes: int = typer.Option(100, "--record-bytes", metavar="N", help="Size of a record's value."),
    within: float = typer.Option(
        60.0,
        "--within",
        metavar="SECONDS",
        help="After the load and the last --kill, all is to be acknowledged and read within this time.",
    ),
    seed: int | None = typer.Option(None, "--seed", metavar="N", help="Seed of random choices; it is printed."),
    keep: bool = typer.Option(False, "--keep", help="Keep the stream. It is kept anyway when something is wrong."),
    output: Output = OUTPUT_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> int:
    """Check that a cluster keeps its promises under a load, while --kill disturbs it.

    Producers send unique records; readers and a consumer group follow. In the end each acknowledged record must be
    there once, in its producer's order; nothing that was read may have changed or vanished; the group must have been
    given everything; and all must go on in time. Ctrl-C ends the load and checks what there is; a second one, or
    SIGTERM, ends the check. The exit code is 0 if everything was kept, 1 if something was not, and 2 if that could not
    be checked.
    """
    from kera.cli.check._options import checked, seconds_of

    options = checked(
        seconds=seconds_of(minutes, seconds),
        stream=stream,
        streamlets=streamlets,
        entries=entries,
        replication=replication,
        durability=durability,
        producers=producers,
        readers=readers,
        members=members,
        rate=rate,
        record_bytes=record_bytes,
        kill=kill,
        kill_every_s=kill_every,
        within_s=within,
        seed=seed,
        keep=keep,
    )
    # gRPC's support of forks has no use here, and logs a line whenever a command is run.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from kera.cli.check._report import EXIT_CODES, progress_of, to_json, to_text
    from kera.cli.check._run import carry_out

    raise_descriptor_limit()
    try:
        # Retries of clients are expected here, and counted: their warnings are not shown.
        outcome = run_async(carry_out(options, bootstrap, progress_of), logged_from=logging.ERROR)
    except (UsageError, typer.Exit):
        raise
    except KeraError as error:
        return fail(error.message, EXIT_NOT_CHECKED)
    except Exception as error:  # noqa: BLE001 - the exit code of a crash would be that of a violation
        traceback.print_exc()
        return fail(f"the check itself has failed: {error!r}", EXIT_NOT_CHECKED)
    text = rendered(to_json(outcome), output) if output.is_document else to_text(outcome)
    return show(f"{text}\n", EXIT_CODES[outcome.verdict], EXIT_NOT_CHECKED)
