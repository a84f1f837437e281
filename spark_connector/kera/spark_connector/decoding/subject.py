"""The versions of a subject, as the driver has fetched them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kera.core.errors import InvalidArgument, UnknownSchema, UnknownSubject
from kera.core.schemas import SchemaType

if TYPE_CHECKING:
    from kera.client import Client

AT_ONCE_MAX = 16
"""Maximum number of versions to ask for in parallel."""
DEFINITIONS_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Version:
    """A version of a subject, with the attributes of a schema in `kera.client.serializers`."""

    schema_id: int
    schema_type: SchemaType
    definition: str
    message: str = ""


@dataclass(frozen=True)
class Subject:
    """A subject with all versions that existed when it was fetched, oldest first."""

    name: str
    versions: tuple[Version, ...]

    @property
    def latest(self) -> Version:
        """The newest version, which defines the fields of values."""
        return self.versions[-1]


async def fetch(client: Client, subject: str) -> Subject:
    """Fetch the versions of a subject. Raises `UnknownSubject`, and the registry's errors.

    Raises `InvalidArgument` if the subject has no version, or if its versions are too large together.
    """
    versions: list[Version] = []
    try:
        numbers = await client.schemas.versions(subject)
    except UnknownSubject as error:
        if subject.endswith(("-value", "-key")):
            raise
        hint = f"{error.message}; a stream's are {subject}-value and {subject}-key"
        raise UnknownSubject(hint, **error.attributes) from error
    for start in range(0, len(numbers), AT_ONCE_MAX):
        asked = (client.schemas.version(subject, number) for number in numbers[start : start + AT_ONCE_MAX])
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, UnknownSchema):  # deleted meanwhile
                continue
            if isinstance(found, BaseException):
                raise found
            versions.append(Version(found.schema_id, found.schema_type, found.definition, found.message))
    size = sum(len(version.definition) for version in versions)
    if size > DEFINITIONS_BYTES_MAX:
        raise InvalidArgument(
            f"the {len(versions)} versions of subject {subject!r} are {size} bytes, which each task would get, and"
            f" at most {DEFINITIONS_BYTES_MAX} are taken: delete those that no value names any more",
            subject=subject,
        )
    if not versions:
        raise InvalidArgument(f"subject {subject!r} has no version", subject=subject)
    return Subject(subject, tuple(versions))
