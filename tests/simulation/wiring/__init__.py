"""The real daemons in a simulation, over replacements of gRPC and ZooKeeper."""
