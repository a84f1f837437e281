"""The parts that daemons share and nobody else uses: access, quotas, monitoring, rules of schemas, registration.

`kera.client` and the Spark connector import none of it, so a program that sends or reads records needs none of it. It
lies beside `kera.core`, on which it stands, as all daemons share both.
"""
