"""Memory and backups: virtual logs and where their replicas are (thesis 5.3.3, 7.3).

``virtual_log`` and ``coverage`` decide, ``manager`` has all of them for a broker, ``backups`` and ``placement`` choose
who gets a copy: none of these waits for anything. ``replicator`` sends what they decide, ``repair`` makes anew what has
too few copies, ``virtual_index`` writes down what is closed. ``hooks`` is where something can be plugged in that puts
off what is sent. Others use `Replication`, `Replicator` and `Repair`; what
becomes of replicas of a broker that is lost is left to ``recovery``.
"""
