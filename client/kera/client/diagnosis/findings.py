"""Findings: ok, warning or problem, with what to do. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Severity(enum.IntEnum):
    """How bad it is; the worst one is the exit code."""

    OK = 0
    WARNING = 1
    PROBLEM = 2

    @property
    def word(self) -> str:
        """As it is printed."""
        return self.name.lower()


class Finding(NamedTuple):
    """Something that was looked at."""

    severity: Severity
    subject: str
    """The subject of the finding: ``broker 2``, ``data directory``."""
    text: str
    advice: str = ""
    """Advice for a finding that is not ok."""


def ok(subject: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """It works, and somebody should look at this."""
    return Finding(Severity.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """It does not work, or not all of it."""
    return Finding(Severity.PROBLEM, subject, text, advice)


def worst(findings: Sequence[Finding]) -> Severity:
    """The worst severity of all findings."""
    return max((each.severity for each in findings), default=Severity.OK)


def lines(findings: Sequence[Finding]) -> list[str]:
    """For people: the worst first, what to do below each."""
    shown = []
    width = max((len(each.subject) for each in findings), default=0)
    for each in sorted(findings, key=lambda each: -each.severity):
        shown.append(f"{each.severity.word.ljust(7)}  {each.subject.ljust(width)}  {each.text}".rstrip())
        if each.advice:
            shown.append(f"{' ' * (width + 11)}→ {each.advice}")
    return shown


def document(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """For programs, in the order in which things were looked at."""
    return [{**each._asdict(), "severity": each.severity.word} for each in findings]
