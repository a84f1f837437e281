"""Encodes a value that a user has typed: text, JSON, msgpack, or by a registered schema."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from google.protobuf import json_format, message_factory

from kera.client import RegisteredSchema
from kera.client.serializers import (
    AvroSerializer,
    Context,
    JsonDeserializer,
    MsgpackSerializer,
    ProtobufSerializer,
)
from kera.client.serializers.protobuf import path_of
from kera.console.browsing.registered import messages_of
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame, message_path_to_bytes

NULL: Final = "null"
BY_SCHEMA: Final = "schema"
KINDS: Final = {
    "text": "Text",
    "json": "JSON",
    "msgpack": "msgpack, typed as JSON",
    BY_SCHEMA: "By a schema, typed as JSON",
    NULL: "Null (tombstone)",
}
"""The forms in which a value may be typed, with names for people."""
CHECKS_MAX: Final = 2
"""Maximum number of values that are checked against a JSON Schema at the same time."""
CHECK_TIMEOUT_S = 10.0
_checks = asyncio.Semaphore(CHECKS_MAX)


async def encode(kind: str, text: str, schema: RegisteredSchema | None, stream: str) -> bytes | None:
    """Encode a value; None for null. `schema` is used if `kind` is ``schema``.

    Raises `InvalidArgument`, `CannotEncode` or `CannotDecode` with a message for the user.
    """
    context = Context(stream, "value")
    match kind:
        case "text":
            return text.encode()
        case "json":
            _document(text)
            return text.encode()  # unchanged: numbers and spaces stay as they were typed
        case "msgpack":
            return MsgpackSerializer()(_document(text), context)
        case "null":
            if text:
                raise InvalidArgument("a null value has no content: empty this field, or choose another format")
            return None
    if schema is None:
        raise InvalidArgument("no schema was chosen")
    return await _by_schema(text, schema, context)


async def _by_schema(text: str, schema: RegisteredSchema, context: Context) -> bytes:
    document = _document(text)
    match schema.schema_type:
        case SchemaType.AVRO:
            return frame(schema.schema_id, AvroSerializer(schema.definition, framed=False)(document, context))
        case SchemaType.PROTOBUF:
            return frame(schema.schema_id, _protobuf(document, schema, context))
        case SchemaType.JSON:
            await _check(text, schema)
            return frame(schema.schema_id, text.encode())
    raise InvalidArgument(f"values are not written by a schema of type {schema.schema_type}")


def _document(text: str) -> Any:
    """Parse JSON. Raises `CannotDecode`, and `InvalidArgument` for empty text."""
    if not text.strip():
        raise InvalidArgument("this takes JSON, and is empty")
    try:
        return JsonDeserializer()(text.encode(), Context("", "value"))
    except CannotDecode as error:
        raise CannotDecode(f"this is not JSON: {error.message}") from error


def _protobuf(document: Any, schema: RegisteredSchema, context: Context) -> bytes:
    outermost = messages_of(schema)
    if not outermost:
        raise InvalidArgument(f"schema {schema.schema_id} has no message")
    found = outermost[0]
    if schema.message:
        try:
            found = found.file.pool.FindMessageTypeByName(schema.message)
        except KeyError as error:
            raise InvalidArgument(f"schema {schema.schema_id} has no message {schema.message}") from error
    if not isinstance(document, dict):
        raise InvalidArgument("a message of Protobuf is typed as a JSON object")
    try:
        message = json_format.ParseDict(document, message_factory.GetMessageClass(found)())
    except (json_format.Error, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"it does not fit message {found.full_name}: {error}") from error
    payload = ProtobufSerializer(type(message), framed=False)(message, context)
    return message_path_to_bytes(path_of(found)) + payload


async def _check(text: str, schema: RegisteredSchema) -> None:
    """Raise `CannotEncode` if a value does not fit a JSON Schema.

    A malicious schema can make a check take for ever (by a pattern, for example). So a separate process does it, and is
    killed after `CHECK_TIMEOUT_S`.
    """
    async with _checks:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kera.console.browsing.schema_check"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                sent = json.dumps({"schema": schema.definition, "value": text})
                answer, _ = await process.communicate(sent.encode())
        except TimeoutError:
            answer = b""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0 or not answer:
        raise InvalidArgument(f"it could not be checked against schema {schema.schema_id}: that takes too long")
    found = json.loads(answer)
    if found["error"]:
        raise CannotEncode(found["error"], field=found["field"], reason=found["error"])


def reason_of(error: InvalidArgument | CannotEncode | CannotDecode) -> str:
    """Return the message of an error for display beside the value's field."""
    if not isinstance(error, CannotEncode):
        return error.message
    field, reason = error.attributes.get("field", ""), error.attributes.get("reason", error.message)
    return f"{field}: {reason}" if field else str(reason)
