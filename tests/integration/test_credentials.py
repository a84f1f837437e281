"""Passwords and tokens are replaced while their user writes: a client that finds the new one in its file continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kera.client import Client
from kera.core.access.rights import Operation
from tests.integration.secured_cluster import PASSWORD, Secured
from tests.integration.support import until

pytestmark = pytest.mark.timeout(180)
NEW = "another password of the same"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        yield Secured(tmp_path_factory.mktemp("credentials"), stack)


@pytest.mark.parametrize(
    ("what", "transport"),
    [
        ("password", "tcp"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("password", "grpc"), ("token", "tcp"), ("token", "grpc"))
        ),
    ],
)
async def test_a_writer_continues_with_the_new_credentials_from_its_file(
    secured: Secured, tmp_path: Path, what: Literal["password", "token"], transport: str
) -> None:
    user = stream = f"{what}-{transport}"
    await secured.make_user(user)
    await secured.grant(f"user:{user}", f"stream:{stream}", Operation.CREATE, Operation.READ, Operation.WRITE)
    file = tmp_path / "file"
    async with await secured.client(user) as owner:
        await owner.admin.create_stream(stream)
        token = await owner.access.issue_token()
        file.write_text(PASSWORD if what == "password" else token.secret)
        shown: dict[str, Any] = {"user": user, "password_file": file} if what == "password" else {"token_file": file}
        settings = secured.settings(transport=transport, **shown)
        async with await Client.connect(secured.cluster.bootstrap, settings) as client:
            acknowledged = 0

            async def write() -> None:
                nonlocal acknowledged
                async with client.producer() as producer:
                    await producer.prepare(stream)
                    while True:
                        await producer.send(stream, b"%d" % acknowledged)
                        acknowledged += 1

            async def goes_on() -> None:
                more = acknowledged + 50
                await until(lambda: acknowledged >= more or writing.done())
                assert not writing.done(), writing.exception()

            writing = asyncio.create_task(write())
            await goes_on()
            if what == "password":
                file.write_text(NEW)
                await owner.access.set_password(user, NEW)
            else:
                file.write_text((await owner.access.issue_token()).secret)
                await owner.access.revoke_token(token.token_id)
            await goes_on()
            assert [each.name for each in await client.admin.list_streams()] == [stream]
            writing.cancel()
            await asyncio.wait([writing])
