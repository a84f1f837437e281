"""What was a lost broker's: found on backups, merged, taken over, and brought here (thesis 7.4).

``scan`` reads what replicas there are, ``merge`` and ``plan`` decide which chunks are where (both pure), ``takeover``
has this broker own them, ``rebuild`` brings their data here through ``replica_reader`` and ``assembly`` while readers
and writers go on. Others use `Takeovers` and `Recovering`; which broker takes what over is decided by the coordinator.
"""
