"""The events of a simulation: the cluster, its clients, their load, and faults."""
