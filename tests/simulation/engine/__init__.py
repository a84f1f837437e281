"""The platform of simulated processes: virtual time, event loops, and a network, from one seed."""
