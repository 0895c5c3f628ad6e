"""What a study was to find out, written down before its runs: plan.json.

It holds every claim and question with the rule that will judge it, the conditions, the seeds, the time, and how many
runs were finished then. It is written before the first cell trains. Nothing in it is ever changed: whoever continues a
study with other claims adds an entry. So a verdict can say of each answer whether it was planned or asked afterwards.

{"schema": 1, "plans": [{"time": …, "nearsight": …, "finished": 0, "conditions": …, "seeds": …, "hash": …, "claims": [
    {"id": …, "text": …, "paper": …, "rule": …, "readings": …}, …]}, …]}

The hash is the sha256 of the claims' canonical JSON. Of results that are older than such files, `finished` is null
where the history of the repository does not say it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from nearsight.errors import InputError
from nearsight.files import LostError, canonical_hash, read_object, write_json
from nearsight.study.lock import Locks
from nearsight.version import __version__

NAME: Final = "plan.json"
SCHEMA = 1
PLANNED, AFTERWARDS, NOT_KNOWN = "planned", "afterwards", "not known"
MARKS = (
    "Asked: *planned*: the question and its rule stand in plan.json since before the first run was finished; "
    "*afterwards*: they were added later; *not known*: no plan from that time is there. Of results that are older than "
    "such plans the question alone counts, by the history of the repository: their rules were stated anew."
)
"""What is said under a table with such marks."""
WAY_OUT = "; put back a whole one, or remove it: then it is not known what was planned"
_LOCK, _SECONDS_BETWEEN_TRIES = "plan", 0.1
_OF_A_CLAIM = ("id", "text", "paper", "rule", "readings")

PlannedClaims = Sequence[Mapping[str, Any]]
"""Of each claim its id, text, rule, the paper's numbers and, where it has two readings, these; all as JSON values."""
Entry = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The entries of plan.json, from the first to the last."""

    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, folder: Path) -> "Plan | None":
        """None where there is no plan. A damaged one is an `InputError`."""
        path = folder / NAME
        if not path.exists():
            return None
        stored = read_object(path, missing=str(folder), way_out=WAY_OUT)
        schema, entries = stored.get("schema"), stored.get("plans")
        if type(schema) is int and schema > SCHEMA:
            raise InputError(f"{path} has schema {schema}, but this nearsight reads up to {SCHEMA}; update nearsight")
        if schema != SCHEMA or not isinstance(entries, list) or not entries:
            raise InputError(f"{path} is damaged: it does not hold plans{WAY_OUT}")
        for number, entry in enumerate(entries):
            if problem := entry_problem(entry):
                raise InputError(f"{path} is damaged: entry {number} {problem}{WAY_OUT}")
        return cls(tuple(entries))

    def is_planned(self, id: str, rule: str) -> bool:
        """Whether the claim stood there, with this rule, when no run was finished yet."""
        return any(entry["finished"] == 0 for entry in self._entries_with(id, rule))

    def mark(self, id: str, rule: str) -> str:
        """When a claim was asked."""
        if self.is_planned(id, rule):
            return PLANNED
        # What stood there before the first entry is not known.
        is_open = (entry["finished"] is None or entry is self.entries[0] for entry in self._entries_with(id, rule))
        return NOT_KNOWN if any(is_open) else AFTERWARDS

    def _entries_with(self, id: str, rule: str) -> list[Entry]:
        return [
            entry
            for entry in self.entries
            if any((claim["id"], claim["rule"]) == (id, rule) for claim in entry["claims"])
        ]


def mark_of(plan: Plan | None, id: str, rule: str) -> str:
    """When a claim was asked, of results with a plan or without one."""
    return NOT_KNOWN if plan is None else plan.mark(id, rule)


def hash_of(claims: PlannedClaims) -> str:
    """Of what each says, without what may be known beside it."""
    return canonical_hash([{name: claim[name] for name in _OF_A_CLAIM} for claim in claims], digits=64)


def entry_problem(entry: Any) -> str:
    """What is wrong with an entry, in words; nothing if it is whole."""
    if not isinstance(entry, dict):
        return "is no object"
    for name, kind in {"time": str, "hash": str, "claims": list, "conditions": list, "seeds": list}.items():
        if not isinstance(entry.get(name), kind):
            return f"does not say its {name}"
    try:
        has_zone = datetime.fromisoformat(entry["time"]).tzinfo is not None
    except ValueError:
        has_zone = False
    if not has_zone:
        return f"was written at {entry['time']!r}, which is no time"
    if entry.get("finished", "") is not None and type(entry.get("finished")) is not int:
        return "does not say how many runs were finished"
    if not all(map(_is_claim, entry["claims"])):
        return f"has a claim without its {', '.join(_OF_A_CLAIM)}"
    if hash_of(entry["claims"]) != entry["hash"]:
        return "has other claims than those of its hash"
    return ""


def _is_claim(claim: Any) -> bool:
    if not isinstance(claim, dict) or not all(isinstance(claim.get(name), str) for name in _OF_A_CLAIM[:-1]):
        return False
    readings = claim.get("readings", "")
    return readings is None or (isinstance(readings, list) and all(isinstance(each, str) for each in readings))


def write_plan(
    folder: Path,
    claims: PlannedClaims,
    *,
    conditions: Sequence[str],
    seeds: Sequence[int],
    finished: Callable[[], int],
    others: Sequence[Entry] = (),
    is_alone: bool = False,
) -> Plan:
    """Add an entry to a folder's plan.json, unless one of it has these very claims; what is there then.

    Args:
        finished: how many runs are finished; asked if an entry is to be added.
        others: entries of the same study elsewhere, which come first if they are older.
        is_alone: no other runner writes to the folder. Otherwise they take turns, by a lock.
    """

    def added(*, is_my_turn: bool) -> Plan | None:
        """None: something is to be written, and it is not this runner's turn."""
        held = Plan.read(folder)
        before = list(held.entries) if held else []
        entries = joined(*before, *others)
        is_new = hash_of(claims) not in {entry["hash"] for entry in entries}
        if not is_new and entries == before:
            return held
        if not is_my_turn:
            return None
        if is_new:
            entries.append(
                {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "nearsight": __version__,
                    "finished": finished(),
                    "conditions": list(conditions),
                    "seeds": list(seeds),
                    "hash": hash_of(claims),
                    "claims": [dict(claim) for claim in claims],
                }
            )
        write_json(folder / NAME, {"schema": SCHEMA, "plans": entries})
        return Plan(tuple(entries))

    plan = added(is_my_turn=is_alone)
    if plan is None:
        with Locks(folder / "locks").kept_alive() as locks:
            while plan is None:
                if not locks.take(_LOCK):
                    time.sleep(_SECONDS_BETWEEN_TRIES)
                    continue
                with suppress(LostError), locks.guarding({_LOCK: folder}):  # lost: by one who was silent for too long
                    plan = added(is_my_turn=True)
    return plan


def joined(*entries: Entry) -> list[Entry]:
    """From the oldest to the youngest; of those with the same claims the oldest alone."""
    found: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: datetime.fromisoformat(entry["time"])):
        found.setdefault(entry["hash"], entry)
    return list(found.values())
