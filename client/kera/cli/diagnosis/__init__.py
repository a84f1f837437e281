"""The findings of ``kera doctor`` about this machine; `kera.client.diagnosis` has the findings about a cluster.

asking        gets the state of a cluster, for commands
host          checks this machine
certificates  checks the certificates of daemons
security      checks the secret of the cluster, and settings of security
"""
