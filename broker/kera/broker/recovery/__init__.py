"""Data of a lost broker: found on backups, merged, taken over, and brought here (thesis 7.4).

``takeover`` has this broker own streamlets: ``survey`` finds out what they are, from headers that ``scan`` reads, and
``merge`` and ``plan`` decide which chunks are where (pure). ``rebuild`` brings their data here while others read and
write them: ``schedule`` says what is read next (pure), ``replica_fetcher`` reads it, ``assembly`` puts it together,
``installer`` has the log know it, and ``progress`` tells. ``healing`` reads what a segment file of this broker does not
have any more. All ask backups through ``replica_reader``. Others use `Takeovers` and `Healing`; which broker takes what
over is decided by the coordinator.
"""
