"""The whole cluster in one process, in virtual time, from one seed.

* ``engine``: virtual time, an event loop for each process, the network between machines, clocks; without KerA.
* ``wiring``: the real daemons and clients as programs of such processes, over the same seams as in production
  (``kera.core.runtime``), and a replacement of gRPC.
* ``world``: the plan of a seed (``plan``), the cluster, its load, its faults, and a run of all of them (``run``).

The SDK's checker judges a run: ``kera.client.checking``. ``make sim SEED=7`` runs a seed, ``make sim SEEDS=100 SEED=1``
many of them; the same seed gives the same run, byte for byte.
"""
