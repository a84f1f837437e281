"""The synchronous SDK offers the names of the asynchronous one, and its generated code is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kera import client as asynchronous
from kera.client import sync
from kera.client.admin.access import Access

ROOT = Path(__file__).resolve().parents[3]
LEFT_OUT: dict[str, set[str]] = {
    "Client": {
        "connect",  # the constructor connects
        "appender",  # for writers that choose their identity and count their chunks themselves
    },
    "Producer": {"drain", "loss", "routes", "send_bytes", "settings"},  # `send` itself waits for room
    "Consumer": {"fetched_ahead", "fetched_bytes", "next_records", "next_batches", "deliver", "give_back"},
    "GroupConsumer": {"busy_ms", "loss", "member_id", "consumer_group", "next_records"},
    "Epochs": {"commit_up_to", "cursors", "positions_of", "streams"},  # for code built on `Epochs`
    "OrderedConsumer": {"next_records"},
    "Admin": set(),
    "Access": set(),
}


def public(of: Any) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_synchronous_class_has_all_names_of_the_asynchronous_one(name: str) -> None:
    of = Access if name == "Access" else getattr(asynchronous, name)
    assert public(of) - public(getattr(sync, name)) - LEFT_OUT[name] == set()


def test_the_generated_synchronous_sdk_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.sync_sdk", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
