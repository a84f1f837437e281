"""This broker's ownership: its streams, the coordinator's orders about them, and whether it may still act on them.

``streams`` has all streams (``stream``), and opens, alters and drops them (``opener``). ``orders`` carries out the
coordinator's orders (``sealing``, ``receiving``). ``handover`` and ``stream_records`` are the records that survive a
restart. ``unknown`` reports streams that the coordinator does not know, and ``moved_starts`` the new starts of entries.
``lease`` decides whether this broker may take chunks, ``coordinator_epoch`` which coordinator it obeys, and
``producer_fences`` which producer instances it refuses. The coordinator decides where streamlets are.
"""
