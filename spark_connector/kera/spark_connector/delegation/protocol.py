"""The protocol between planning processes and the process that keeps tokens.

    request   {"bootstrap": "h:1", "settings": {…}, "resources": ["stream:a"], "lifetime_ms": 28800000, "hold": false}
    answer    {"token": "…"}
    or        {"error": {"code": "not_allowed", "message": "…", "attributes": {…}}}

One JSON object per line each way. With ``hold`` the token is held until the connection ends, otherwise until the driver
ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kera.client import ClientSettings


def settings_to_json(settings: ClientSettings) -> dict[str, Any]:
    """Return the settings with their secrets, only for a socket between processes of one user."""
    values = settings.model_dump()
    for name in ("password", "token"):
        if values[name] is not None:
            values[name] = values[name].get_secret_value()
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def settings_from_json(values: dict[str, Any]) -> ClientSettings:
    """Return the inverse of `settings_to_json`, without settings from this process's environment."""
    from kera.client import ClientSettings

    return ClientSettings(**values)
