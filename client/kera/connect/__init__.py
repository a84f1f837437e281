"""Copies between streams and other systems: files, Kafka, PostgreSQL.

A copy has a source and a target, one of which is a stream. It reads pieces (`pieces`): rows as Arrow batches, each with
the places between which it lies in its source. What was copied, and up to where, becomes durable in the target at once,
so that a copy that is killed at any moment goes on where it was, and neither loses nor doubles anything:

* a target with transactions has the places beside the rows, in the same transaction (PostgreSQL, Kafka);
* files have them in a list that names those that count;
* a stream has a journal (`streams.journal`): what is going to be appended, as which chunks, is written there first, and
  the broker takes each chunk once.

What comes next from which state is decided without I/O, in `planning`. `copying` runs a copy; each system has a package
of its own, which nothing else knows.
"""
