"""Findings: ok, warning or problem, with advice. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Severity(enum.IntEnum):
    """The severity of a finding; the worst one is the exit code."""

    OK = 0
    WARNING = 1
    PROBLEM = 2

    @property
    def word(self) -> str:
        """The word that is printed."""
        return self.name.lower()


class Finding(NamedTuple):
    """The result of one check."""

    severity: Severity
    subject: str
    """The subject of the finding: ``broker 2``, ``data directory``."""
    text: str
    advice: str = ""
    """Advice for a finding that is not ok."""


def ok(subject: str, text: str) -> Finding:
    """Return a finding of something that works."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of something that works but needs attention."""
    return Finding(Severity.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of something that does not work, at least in part."""
    return Finding(Severity.PROBLEM, subject, text, advice)


def worst(findings: Sequence[Finding]) -> Severity:
    """Return the worst severity of all findings."""
    return max((each.severity for each in findings), default=Severity.OK)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return lines of text: the worst findings first, each with its advice below."""
    shown = []
    width = max((len(each.subject) for each in findings), default=0)
    for each in sorted(findings, key=lambda each: -each.severity):
        shown.append(f"{each.severity.word.ljust(7)}  {each.subject.ljust(width)}  {each.text}".rstrip())
        if each.advice:
            shown.append(f"{' ' * (width + 11)}→ {each.advice}")
    return shown


def document(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return the findings as JSON-like objects for programs, in their order."""
    return [{**each._asdict(), "severity": each.severity.word} for each in findings]
