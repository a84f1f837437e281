"""Names of streams and consumer groups that KerA keeps for itself, such as the journals of copies (``_connect.NAME``).

Lists leave them out unless the caller asks for them.
"""

INTERNAL_PREFIX = "_"


def is_internal(name: str) -> bool:
    """Return whether `name` is the name of an internal stream or consumer group."""
    return name.startswith(INTERNAL_PREFIX)
