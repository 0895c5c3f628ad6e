"""What a check of a data set found."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    """The thing."""
    ok: bool
    """Whether it is as it should be."""
    detail: str
    """What was found, and what was expected if that differs."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything that was checked about a data set."""

    name: str
    """The data set."""
    folder: Path | None
    """Where it is; None when it needs no files."""
    layout: str
    """Which layout was found there."""
    findings: tuple[Finding, ...]
    """In the order of the checks."""

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def count_finding(what: str, found: int, expected: int | None) -> Finding:
    """A number of things, and how many are published if that is known."""
    ok = expected in (None, found)
    return Finding(what, ok, f"{found:,}" if ok else f"{found:,}, but {expected:,} are published")
