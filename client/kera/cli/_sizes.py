"""Numbers of bytes as people write them: ``256MiB``, ``1GB``, ``8388608``."""

from __future__ import annotations

from kera.cli._run import UsageError
from kera.core.base.sizes import size_bytes


def parse_size(text: str, *, name: str = "size") -> int:
    """Return the number of bytes in `text`, see `kera.core.base.sizes`. Raises `UsageError` that mentions `name`."""
    found = size_bytes(text)
    if found is None:
        raise UsageError(f"{name}: {text!r} is not a size; write 8388608, 8MiB or 1GB", name=name)
    return found
