"""Latency constraints and targets: how long chunks may fill, what is measured of their way, and brokers' advice."""
