"""The console's memory between two requests: bounded, and never stored."""
