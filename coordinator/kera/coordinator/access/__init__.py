"""Users, rules and tokens: kept in the metadata, changed on request, told to all daemons.

* ``records``: where they are kept, and the table that daemons go by.
* ``changes``: what a request makes of them. Pure.
* ``remarks``: what is said of a rule that may not be meant.
* ``telling``: all daemons go by the newest.
* ``service``: the requests.
"""
