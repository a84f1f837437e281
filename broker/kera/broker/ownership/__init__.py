"""This broker's ownership: its streams, the coordinator's orders about them, and whether it may still act on them.

``streams`` has all streams (``stream``) and opens, alters and drops them (``opener``, ``removal``); ``orders`` takes
the coordinator's orders (``sealing``, ``receiving``), ``handover`` and ``stream_records`` write down what outlives a
start, ``unknown`` tells of streams that the coordinator does not know, ``moved_starts`` of where entries start.
``lease``, ``coordinator_epoch`` and ``producer_fences`` say who may write, who may order, and who has been replaced.
Where streamlets are to be is decided by the coordinator.
"""
