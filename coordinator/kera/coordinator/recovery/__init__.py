"""Recovery of a dead broker: its streamlets go to others, who make its data anew from backups (thesis 7.4).

``decide`` says what comes next, from what is known and nothing else; ``carry_out`` asks brokers and backups, and writes
down how far it is. Others use `Recoveries`; how a broker takes a streamlet over is the broker's business.
"""
