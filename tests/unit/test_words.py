"""Words that the project has given up for plainer or more usual ones, and that must not come back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IS_NO = r'"[^"\n]*(?<!here )\b(is|are) no (?!(longer|later|further|more|less|fewer|lower|higher)\b)\w'
"""Slow: it is searched only in lines that have the word."""
RETIRED = {
    r"application_ids?\b": "consumer_group",
    r"FetchApplication": "FetchConsumerGroup",
    r"HEARD OF": "LAST HEARTBEAT",
    r"IN ITS CODE FOR": "PROCESSING FOR",
    r"is an episode": "is a brief interruption",
    r"Two doors": "Two transports",
    r"without a word about it": "by default",
    r"what others still have to learn": "propagating to other brokers",
    r"Who is to (own|be emptied)": "Target broker, Member to drain",
    r"retention_applications": "retention_consumer_groups",
    r"\bexcuse\b": "extend_timeouts",
    r"(def |\.)(backups_are|info_is|heard_of)\(": "update_backups, update_address, observe_epoch",
    r"\bGroupSettings\b": "GroupConsumerSettings",
    r"\b(GroupFeed|HeldGroup)\b": "Fetcher, LeasedGroup",
    r"ended of a defect": "unexpected exception",
    r"KERA_GROUP_(?!CONSUMER_)": "KERA_GROUP_CONSUMER_",
    r"retention[-_]application": "retention_consumer_group",
    r"a word about it": "what is meant",
    r"left without a word": "could not notify the coordinator on leave",
    r"[aA]ppend [lL]ane": "entry",
    r"push_lanes": "push_subscriptions",
    r"before launch \{": "incarnations before epoch",
    r"LOAD THEN|WHY NOT|SEGMENTS OF\b": "LOAD AFTER, REASON, SEGMENT SIZE",
    r"exclude each other": "are mutually exclusive",
    r": all is well\"": "no damage",
    r"What becomes of a chunk": "Delivery result of a chunk",
    IS_NO: "is not a",
}
KEPT = ("CHANGELOG.md", "tests/unit/test_words.py")
SUFFIXES = {".py", ".md", ".proto", ".java", ".toml", ".sh", ".c", ".go"}


def hits(text: str) -> list[str]:
    with_no = "\n".join(line for line in text.splitlines() if " no " in line)
    return [pattern for pattern in RETIRED if re.search(pattern, with_no if pattern == IS_NO else text)]


def test_retired_words_do_not_come_back() -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = {}
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if name not in KEPT and path.suffix in SUFFIXES and path.is_file():
            words = hits(path.read_text())
            if words:
                found[name] = {word: RETIRED[word] for word in words}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        *("def heard_of(self) -> None:", "application_id = 1", "Two doors: frames and gRPC.", "KERA_GROUP_START"),
        'raise StartError(f"{path} is no directory")',
    ],
)
def test_a_retired_word_is_found(line: str) -> None:
    assert len(hits(line)) == 1
