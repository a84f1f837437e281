"""A member of a consumer group: its leases, its rounds with the coordinator, and its heartbeats."""
