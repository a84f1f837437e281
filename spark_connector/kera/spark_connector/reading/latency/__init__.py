"""How late a query's records are: when micro-batches begin (``pace``), and what brokers are told of them (``hops``)."""
