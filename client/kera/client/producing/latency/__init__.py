"""Latency constraints and targets: how long chunks may fill, measurements of their delays, and brokers' advice."""
