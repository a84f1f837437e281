"""The findings of ``kera cluster health`` and ``kera doctor``, and their output.

findings  ok, warning or problem, with what to do: as text, as JSON, as an exit code
asking    asks the coordinator and each daemon
cluster   judges what they have said; pure
host      looks at this machine, and judges it
security  looks at the secret of the cluster, and at settings of security
"""
