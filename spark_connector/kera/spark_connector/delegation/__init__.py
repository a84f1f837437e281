"""Authentication of executors, with a token that the driver gets for them.

A user's password, token and certificate key stay on the driver. Executors and Python workers use a delegation token. It
has the user's rights, restricted to the streams that the query reads or writes. It is valid for some hours, and longer
only if the driver renews it.

The token travels in the objects from which Spark makes tasks: in each partition to read (``KeraPartition``,
``KeraInputPartition``), and in the writer or its factory. Spark serializes these objects, and shows them nowhere. What
Spark does show or store (plans, options, its UI, event logs, checkpoints, the environment and the command lines of
executors) never contains a token, and printing such an object hides it (`Secret`). Other ways are worse: options and
properties are visible, files lie on the disks of hosts, a server on the driver would add an attack surface, and Spark's
``HadoopDelegationTokenProvider`` works only with Kerberos and from a jar. No token has to be sent twice, either: a
renewed token keeps its secret, and a new one comes with the tasks of the next micro-batch, which are made then.

One process per driver, ``__main__``, keeps the tokens, and planning processes ask it (`asking`). They cannot keep
tokens themselves: Spark plans a Python data source in processes that last for one call, does not report the end of a
batch, and may run a plan again much later with the same partitions. So the token of a batch is valid until the driver
ends, and the token of a stream until the query stops (then its planning process ends, and with it its `Lease`). After
that the token is revoked; if that fails, it expires.

A driver that has only a delegation token gets no further token: it passes that one on. For a driver with only a
certificate, no token is made unless ``token.lifetime`` is set: executors have certificates at the same path.
"""
