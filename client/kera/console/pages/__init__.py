"""The pages: each asks the user's view of the cluster, and fills a template. `actions` has changes to the cluster."""
