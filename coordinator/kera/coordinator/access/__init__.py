"""Users, rules and tokens: kept in the metadata, changed on request, sent to all daemons.

* ``records``: the records in the metadata, and the table that daemons apply.
* ``changes``: the changes that a request makes to them. Pure.
* ``telling``: brings the newest table to all daemons.
* ``service``: the requests, and remarks on rules that may be mistaken.
"""
