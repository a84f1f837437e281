"""The backup: keeps replicas of brokers' virtual segments, in memory first and then on disk (thesis 6.3.3)."""
