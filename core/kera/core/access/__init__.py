"""Access control: identities, rights, and the guard in front of a daemon's services.

* ``identity``: who somebody is; ``rights``: rules, and what follows from them; ``requirements``: what each method asks
  for. Pure.
* ``accounts``: users and tokens as the coordinator has told them; ``certificates``, ``passwords``: what somebody shows
  for who it is; ``authenticator``: all of that together.
* ``jwt_tokens``: tokens of another issuer; ``jwt_keys``: its keys; ``jwt_sources``: where those are. On daemons only.
* ``guard``: finds out who asks, refuses what is not allowed, and ends what is allowed no more.
* ``credentials``: the calling end, which shows who it is; ``settings``: of both ends.

Encryption is ``kera.core.security``; where users and rules are kept is the coordinator's.
"""
