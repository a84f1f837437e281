"""How executors are known to the cluster: by a token that the driver gets for them.

A user's password, its own token and the key of its certificate stay on the driver. Executors and Python workers show a
delegation token, which has the user's rights, but for the streams only that the query reads or writes; it is good for
some hours, and for longer only because the driver renews it.

How it gets to them: in what tasks are made from, that is, in each partition that is read (``KeraPartition``,
``KeraInputPartition``), and in the writer or its factory. Spark serializes these and shows them nowhere; what it shows
or keeps (plans, options, its UI, event logs, checkpoints, the environment and the command lines of executors) has
nothing of a token, and who prints such an object sees none (`Secret`). Other ways are worse: options and properties are
shown, files lie on the disks of hosts, a server on the driver would be another door, and Spark's own
``HadoopDelegationTokenProvider`` is for Kerberos only and for a jar. Nothing has to be sent twice, either: a token that
is renewed has the same secret, and one that took another's place comes with the tasks of the next micro-batch, as these
are made then.

Who keeps it: one process per driver, ``__main__``, which whoever plans asks (`asking`). None of those who plan could:
Spark has the Python data source plan in processes that last for a call, tells nobody of the end of a batch, and may run
a plan again much later with the partitions that it has. So a batch's token is good until the driver has ended, and the
token of a stream until that has stopped (then the process that plans it is gone, and with it its `Lease`). Then it is
revoked. Whoever cannot do that any more leaves one that ends with its hours.

A driver that only has a delegation token itself gets no further one: it hands on that. One with a certificate alone
has none made unless ``token.lifetime`` asks for it: executors have certificates at the same place, as they always had.
"""
