"""Data of a lost broker: found on backups, merged, taken over, and brought here (thesis 7.4).

``takeover`` makes this broker the owner of streamlets: ``survey`` finds out their state from headers that ``scan``
reads, and ``merge`` and ``plan`` decide which chunks are where (pure). ``rebuild`` brings their data here while clients
read and write them: ``schedule`` decides what is read next (pure), ``replica_fetcher`` reads it, ``assembly`` puts it
together, ``installer`` adds it to the log, and ``progress`` counts it. ``healing`` restores damaged data of this
broker's segment files. All ask backups through ``replica_reader``. Other packages use `Takeovers` and `Healing`. The
coordinator decides which broker takes over which streamlets.
"""
