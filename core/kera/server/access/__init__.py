"""Access control in front of a daemon: it authenticates callers, and refuses operations without a right.

* ``requirements``: the right that each method demands. Pure.
* ``authenticator``: establishes an identity by a password, a certificate, a token or the cluster secret.
* ``jwt_tokens``: tokens of another issuer; ``jwt_keys``: its keys; ``jwt_sources``: where the keys are read.
* ``guard``: authenticates callers, refuses operations without a right, and ends connections that have lost rights.
* ``quotas``, ``usage``, ``totals``, ``pacing``: how much a user may use, has used, and how long an answer waits.
* ``audit``: the log of failures, denials and changes; ``settings``: the settings of access, for all daemons.

`kera.core.access` has identities and rights. Encryption is ``kera.core.security``; the coordinator stores users and
rules.
"""
