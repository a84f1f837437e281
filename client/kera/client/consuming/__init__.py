"""Consumers: of a range of a stream, or of what a consumer group leaves to each of its members.

``consumer`` and ``group_consumer`` are what users have. Both have ``fetcher`` fetch ahead, by push or pull, and
``chunks`` open what has come; ``records`` and ``values`` make Python objects of it. A member of a consumer group has
``leases``, talks to the coordinator in ``rounds``, sends heartbeats (``keep_alive``, ``liveness``), and finds groups to
be read (``group_discovery``). How a broker is read from is ``cluster``'s business.
"""
