"""The whole cluster in one process, in virtual time, from one seed.

* ``engine``: virtual time, an event loop for each process, the network between machines, clocks; knows nothing of KerA.
* ``wiring``: the real daemons and clients as programs of such processes, over the seams that production uses as well
  (``kera.core.runtime``), and what takes the place of gRPC.
* ``world``: what a seed stands for (``plan``), the cluster, its load, its faults, and a run of all that (``run``).

The checker that judges a run is the SDK's: ``kera.client.checking``. ``make sim SEED=7`` runs a seed, ``make sim
SEEDS=100 SEED=1`` many of them; the same seed does the same, byte for byte.
"""
