"""The latency of a query: when its micro-batches begin (``pace``), and the reports to brokers about it (``hops``)."""
