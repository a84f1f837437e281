"""What takes the place of parts that cannot run in a simulation: gRPC, ZooKeeper; and the real daemons on top."""
