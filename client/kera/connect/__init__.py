"""Copies between streams and other systems: files, Kafka, PostgreSQL.

A copy has a source and a target, and at least one of them is a stream. It reads pieces (`pieces`): rows as Arrow
batches, each with the places between which it lies in its source. The rows and the place of the copy become durable in
the target together. So a copy that is killed at any moment continues where it was, and neither loses nor duplicates
rows:

* a target with transactions stores the places with the rows, in the same transaction (PostgreSQL, Kafka);
* a target of files stores them in a list of the files that count;
* a stream has a journal (`streams.journal`). The copy first writes there what it is going to append, and as which
  chunks; the broker takes each chunk once.

`planning` decides without I/O what comes next in which state. `copying` runs a copy. Each system has its own package,
which the other modules do not depend on.
"""
