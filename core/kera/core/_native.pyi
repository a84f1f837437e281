# See kera.core.native; the sources are in core/native.

from collections.abc import Callable
from typing import Any

VERSION: int
SOURCES: str
APPEND_RULES: str
CRC32C_BY_INSTRUCTION: bool

def bind(name: str, twin: Callable[..., Any], returned: type | None) -> Any: ...
def layout() -> dict[str, Any]: ...
