"""Identities, rights, passwords and the cluster secret: the part of access that clients and daemons share.

`kera.server.access` has the rest: it decides who may do what, in front of every daemon.
"""
