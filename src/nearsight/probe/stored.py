"""What probes found, on disk: a file for each, named by everything its numbers depend on.

results/PROBE-IDENTITY.json   the scores with their intervals, and what they are of

The identity is that of the model (weights, and settings that no weight shows, such as the number of heads), the data
and the options. So a probe that was done once is found again, whatever the model is called, and never mistaken.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.configuration import decode
from nearsight.files import canonical_hash, write_json
from nearsight.probe.bootstrap import Score

VERSION = 1
"""Raise it whenever the same key would stand for other numbers."""


@dataclass(frozen=True, kw_only=True)
class ProbeKey:
    """What the numbers of a probe depend on."""

    probe: str
    """knn, linear, retrieve or segment."""
    model: str
    """Its `nearsight.probe.identity.model_identity`."""
    preparation: Mapping[str, Any]
    """How its images are prepared."""
    data: str
    """Fingerprint of the data set."""
    settings: Mapping[str, Any]
    """Everything else."""

    @property
    def identity(self) -> str:
        # Through JSON, in which a tuple is a list.
        return canonical_hash({"version": VERSION, **json.loads(json.dumps(vars(self)))})


@dataclass(frozen=True, kw_only=True)
class StoredProbe:
    """What a probe found."""

    probe: str
    identity: str
    scores: Mapping[str, Score]
    """By the name of what is measured."""
    told: Mapping[str, Any]
    """Whose features these are and which, the data set, the settings, and further numbers."""


class ProbeStore:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: ProbeKey) -> Path:
        return self._folder / f"{key.probe}-{key.identity}.json"

    def read(self, key: ProbeKey) -> StoredProbe | None:
        """What is there; None where that is nothing, or damaged."""
        try:
            held = json.loads(self.path(key).read_text(encoding="utf-8"))
            scores = {name: decode(Score, score) for name, score in held.pop("scores").items()}
            if (held.pop("probe"), held.pop("identity")) != (key.probe, key.identity):
                return None
        except (OSError, ValueError, KeyError, AttributeError, RecursionError):  # an InputError is a ValueError
            return None
        return StoredProbe(probe=key.probe, identity=key.identity, scores=scores, told=held)

    def write(self, key: ProbeKey, scores: Mapping[str, Score], told: Mapping[str, Any]) -> StoredProbe:
        """All of it at once, or nothing."""
        of_scores = {name: score.as_json() for name, score in scores.items()}
        write_json(
            self.path(key), {"probe": key.probe, "identity": key.identity, "scores": of_scores, **told}, allow_nan=False
        )
        return StoredProbe(probe=key.probe, identity=key.identity, scores=scores, told=told)
