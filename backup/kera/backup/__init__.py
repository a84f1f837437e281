"""The backup: keeps replicas of brokers' virtual segments, in memory first and then on disk (thesis 6.3.3, 7.3).

The best order to read it:

* ``replica``: the state of one replica, and its chunks; ``slots``: the memory of open replicas.
* ``frames``: the layout of replicas on a disk; ``log_file``: the file of one disk, as bytes and blocks.
* ``replicas``: the replicas of a backup; ``store``: appending, closing, freeing; ``persistence``: plans which replicas
  are written to disk, and when; ``disks``: the state of each disk, mainly its room; ``jobs``: planned work on disks.
* ``performer``: performs the jobs on threads; ``restart``: reads the disks at a start; ``reading`` and ``reader``: read
  chunks of a replica for recoveries; ``fences``: the broker epochs that are refused, which outlive the process.
* ``engine``: starts, runs and stops all of this; ``service``: the remote calls.
* ``settings``, ``metrics``, ``registration``, ``errors``, and the process itself (``__main__``).
* ``verify``: checks the directory of a backup that does not run.

Promises: acknowledged data are in memory until they are on disk or freed; data acknowledged as persisted exist after
any crash; a chunk that does not match its checksums is never served; memory and disk never exceed their limits.

The broker decides on which backups a virtual segment is, and what happens to it when a backup fails.
"""
