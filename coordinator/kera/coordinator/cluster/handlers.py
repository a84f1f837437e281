"""The handlers of each part of the coordinator: requests in, responses out, by method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kera.core.rpc.method import Method

Handlers = Mapping[Method[Any, Any], Callable[[Any], Any]]
"""A handler returns the response, or an awaitable for it; errors are raised."""
