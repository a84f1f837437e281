"""The machine that processes run on: virtual time, event loops, and a network, from one seed."""
