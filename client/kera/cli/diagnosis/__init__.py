"""The findings of ``kera doctor`` about this machine; those about a cluster are in `kera.client.diagnosis`.

asking        asks the cluster that a command is about
host          looks at this machine, and judges it
certificates  looks at the certificates of a daemon
security      looks at the secret of the cluster, and at settings of security
"""
