"""Recovery of a dead broker: its streamlets go to others, which restore its data from backups (thesis 7.4).

``decide`` chooses the next step from the present state alone; ``carry_out`` calls brokers and backups, and stores the
progress. Others use `Recoveries`; how a broker takes a streamlet over is the broker's business.
"""
