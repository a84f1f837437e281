"""Names of streams and consumer groups that KerA keeps for itself, such as the journals of copies (``_connect.NAME``).

Lists leave them out unless somebody asks for them.
"""

INTERNAL_PREFIX = "_"


def is_internal(name: str) -> bool:
    """Whether `name` is that of an internal stream or consumer group."""
    return name.startswith(INTERNAL_PREFIX)
