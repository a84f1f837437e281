"""Access control in front of a daemon: it finds out who asks, and refuses what is not allowed.

* ``requirements``: the right that each method asks for. Pure.
* ``authenticator``: proves an identity by a password, a certificate, a token or the cluster secret.
* ``jwt_tokens``: tokens of another issuer; ``jwt_keys``: its keys; ``jwt_sources``: where those are.
* ``guard``: finds out who asks, refuses what is not allowed, and ends connections whose rights have gone.
* ``quotas``, ``usage``, ``totals``, ``pacing``: how much a user may use, has used, and how long an answer waits.
* ``audit``: the log of failures, denials and changes; ``settings``: those of all daemons.

`kera.core.access` has identities and rights. Encryption is ``kera.core.security``; the coordinator stores users and
rules.
"""
