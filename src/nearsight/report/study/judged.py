"""What every verdict file is made of: a row per judged claim, how many came out how, and the rules."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pandas as pd

from nearsight.report.study.claim import OURS
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import MISSING


class Claimed(Protocol):
    """What a paper says, or what we ask."""

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def paper(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def readings(self) -> tuple[str, str] | None: ...


class Judged(Protocol):
    @property
    def claim(self) -> Claimed: ...
    @property
    def finding(self) -> Finding: ...


def not_tested(reason: str) -> Finding:
    return Finding(verdict=Verdict.NOT_TESTED, ours=reason, value=float("nan"), n=0)


def judged_rows(judgements: Iterable[Judged], scale: str, *, of_paper: bool = True) -> dict[str, pd.DataFrame]:
    """The `numbers` and what is `shown` of a table of verdicts. `of_paper`: claims, with what the paper has, and
    perhaps questions of our own among them; else nothing but such questions."""
    judged = list(judgements)
    is_mixed = any(judgement.claim.source == OURS for judgement in judged)
    asked = "question" if not of_paper else "claim or question" if is_mixed else "claim"
    rows: list[dict[str, Any]] = []
    shown: list[dict[str, str]] = []
    for number, judgement in enumerate(judged, start=1):
        claim, finding = judgement.claim, judgement.finding
        texts = {"claim": claim.text, "source": claim.source, "paper": claim.paper, "ours": finding.ours}
        numbers = {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n}
        rows.append({"number": number, **texts, **numbers, "verdict": str(finding.verdict), "scale": scale})
        shown.append(
            {
                "": str(number),
                asked: f"{claim.text} ({claim.source})",
                **({"paper": claim.paper} if of_paper else {}),
                "ours" if of_paper else "numbers": finding.ours,
                "seeds": str(finding.n) if finding.n else MISSING,
                "verdict" if of_paper else "answer": f"**{finding.verdict}**",
            }
        )
    return {"numbers": pd.DataFrame(rows), "shown": pd.DataFrame(shown)}


def counted(words: Sequence[str], known: Iterable[str]) -> str:
    """How often each of the known words stands among these, in their order."""
    return ", ".join(f"{words.count(word)} {word}" for word in known if word in words)


def rules_in_words(judgements: Iterable[Judged]) -> list[str]:
    lines = ["## The rules", "", "Every verdict is computed by one of these; what it judges is in brackets.", ""]
    numbered = list(enumerate((judgement.claim for judgement in judgements), start=1))
    for rule in dict.fromkeys(claim.rule for _, claim in numbered):
        claims = [(number, claim) for number, claim in numbered if claim.rule == rule]
        lines.append(f"- {rule} ({', '.join(str(number) for number, _ in claims)})")
        for number, claim in claims:
            if claim.readings is not None:
                strict, weak = claim.readings
                lines.append(f"  - {number}. Strict: {strict}. Weak: {weak}.")
    return [*lines, ""]
