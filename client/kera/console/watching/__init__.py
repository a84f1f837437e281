"""What the console remembers between two requests: bounded, and only in its memory."""
