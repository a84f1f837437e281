"""What happens in a simulation: the cluster and its clients, what they do, and what befalls them."""
