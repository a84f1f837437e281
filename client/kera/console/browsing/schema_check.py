"""A process that checks one value against a JSON Schema; see `kera.console.browsing.encoding`.

Standard input is a JSON object of ``schema`` and ``value``, both texts of JSON. Standard output is a JSON object of
``field`` and ``error``, both empty if the value fits. Processor time and memory are bounded. The process does not
import KerA, which would take ten times as long as the check.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

CPU_S = 5
MEMORY_BYTES = 1 << 30


def main() -> None:
    """Read, check, and answer."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin)
    json.dump(_checked(json.loads(asked["schema"]), json.loads(asked["value"])), sys.stdout)


def _checked(schema: Any, value: Any) -> dict[str, str]:
    try:
        import jsonschema  # noqa: PLC0415 - it may be missing, which is an answer
        import referencing  # noqa: PLC0415
    except ImportError:
        return {"field": "", "error": "a JSON Schema needs jsonschema: pip install 'kera[serializers]'"}
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        # An empty registry, so that references of a schema are never fetched.
        for error in kind(schema, registry=referencing.Registry()).iter_errors(value):
            return {"field": error.json_path.removeprefix("$").removeprefix("."), "error": error.message[:500]}
    except referencing.exceptions.Unresolvable as error:
        return {"field": "", "error": f"the schema refers to {error.ref!r}, which it does not have"}
    except (ValueError, TypeError, RecursionError, jsonschema.SchemaError) as error:
        return {"field": "", "error": f"this is not a valid JSON Schema: {error}"[:500]}
    return {"field": "", "error": ""}


if __name__ == "__main__":
    main()
