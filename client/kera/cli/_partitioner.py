"""The option ``--partitioner``: how keys decide where records go (docs/client.md)."""

from __future__ import annotations

import enum

import typer


class PartitionerChoice(enum.StrEnum):
    """The values of the setting ``partitioner`` of producers."""

    CRC32C = "crc32c"
    MURMUR2_RANDOM = "murmur2_random"
    CONSISTENT_RANDOM = "consistent_random"


PARTITIONER_OPTION = typer.Option(
    None,
    "--partitioner",
    metavar="NAME",
    help="How keys decide the streamlet: crc32c, murmur2_random (as Kafka's client in Java) or consistent_random (as"
    " librdkafka). Default: the producers' setting, crc32c.",
    show_default=False,
)
