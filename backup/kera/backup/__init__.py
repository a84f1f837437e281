"""The backup: keeps replicas of brokers' virtual segments, in memory first and then on disk (thesis 6.3.3, 7.3).

In the order in which it is best read:

* ``replica``: what is known of one replica, and its chunks; ``slots``: the memory that open replicas are in.
* ``frames``: how a replica lies on a disk; ``log_file``: the file of one disk, as bytes and blocks.
* ``replicas``: which ones there are; ``store``: appending, closing, freeing; ``persistence``: what goes to disk, and
  when; ``disks``: what is known of each disk, its room above all; ``jobs``: what has to be done there, as plain data.
* ``performer``: does the jobs, on threads; ``restart``: what a start finds on the disks; ``reading`` and ``reader``:
  chunks of a replica for whom recovers; ``fences``: the broker epochs that are refused, as they outlive the process.
* ``engine``: makes all of it ready, keeps it going, and puts it away; ``service``: the remote calls.
* ``settings``, ``metrics``, ``registration``, ``errors``, and the process itself (``__main__``).
* ``verify``: looks at a backup's directory while it does not run.

Promises: what was answered is in memory until it is on disk, or freed; what was answered as persisted is there after
any crash; a chunk that does not match its checksums is never served; memory and disk never exceed what they were given.

Which backups a virtual segment is on, and what happens to it when one fails, is left to the broker.
"""
