"""Memory and backups: virtual logs and where their replicas are (thesis 5.3.3, 7.3).

``virtual_log`` and ``coverage`` decide what to replicate, ``manager`` joins them for a broker, and ``backups`` and
``placement`` choose the backups that get a copy; none of these waits for anything. ``replicator`` sends the requests,
``repair`` copies again what has too few copies, and ``virtual_index`` records closed virtual segments. A plug-in can
delay batches through ``hooks``. Other packages use `Replication`, `Replicator` and `Repair`. ``recovery`` deals with
the replicas of a lost broker.
"""
