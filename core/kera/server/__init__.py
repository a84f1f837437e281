"""The parts that only daemons share: access, quotas, monitoring, rules of schemas, registration.

`kera.client` and the Spark connector do not import this package, so programs that send or read records do not need it.
It is beside `kera.core`, on which it depends, as all daemons share both.
"""
