"""The pages: each asks the view of who asks, and fills a template. `actions` are what changes the cluster."""
