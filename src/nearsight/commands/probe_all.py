"""`nearsight probe all MODEL …`: every probe of one model, of several, or of all runs of a study, and one table."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsight.commands.options import parse, short_name, stoppable
from nearsight.commands.probe import UNTRAINED, run_path
from nearsight.commands.probing_all import PROVENANCE, RESULTS, AllProbes, AllRequest
from nearsight.errors import InputError
from nearsight.files import PROBES, check_kind, check_output_folder, write_json
from nearsight.models import ModelConfig
from nearsight.train import Stop

if TYPE_CHECKING:
    from nearsight.probe.frozen import FrozenModel
    from nearsight.probe.scores import StoredProbe
    from nearsight.report.probes import ProbedModel, ProbeResults
    from nearsight.study.plan import Plan

_NAMES = {(False, False): "ViT", (True, False): "ViT + GAug", (False, True): "ViT + PRR", (True, True): "LocAt"}
"""By gaug and prr, in the words of the LocAt studies."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from."""

    text: str
    """What it is opened by."""
    condition: str | None = None
    seed: int | None = None
    ran: Mapping[str, float] = field(default_factory=dict)
    """What a study says of its run, by the names of `ProbedModel`."""

    @property
    def label(self) -> str | None:
        """Its name for people, where its condition says more than its folder's name."""
        return None if self.condition is None else f"{self.condition}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Origins:
    """All models that were named."""

    name: str
    """Of the study, or of the models together; a title."""
    folder: str
    """Likewise, as part of a folder's name."""
    models: tuple[Origin, ...]
    scale: str = "full"
    planned: tuple[str, ...] = ()
    """The conditions of the study, done or not."""


@dataclass(frozen=True, kw_only=True)
class AllOptions(AllRequest):
    """Probe frozen models in every way: k-NN and a linear classifier on a data set with classes, dense retrieval and a
    segmentation head on one with masks.

    MODEL may be the folder of a study: then all its finished runs are probed, and conditions are compared over seeds.
    Every result is written as soon as it is there; the same command does only what is missing. Writes probes.csv,
    probes.md, a figure, a page, provenance.json and, of several conditions, their comparison and a verdict on S2's
    claims.
    """


def main(arguments: Sequence[str]) -> int:
    options = parse(AllOptions, arguments, prog="nearsight probe all")
    options.check("all")
    from nearsight.study.results import check_place

    origins = find_origins(options.models)
    out = options.out or Path("runs") / f"probes-{origins.folder}"
    check_output_folder(out)
    check_kind(out, PROBES)
    check_place(out, origins.scale)
    options = replace(options, models=tuple(origin.text for origin in origins.models))
    return stoppable(lambda stop: _probe_all(options, origins, out, arguments, stop))


def _probe_all(options: AllOptions, origins: Origins, out: Path, arguments: Sequence[str], stop: Stop) -> int:
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.papers import declare_all
    from nearsight.report.page.folders import write_folder_page
    from nearsight.report.probe_tables import write_probe_report
    from nearsight.report.probes import ProbeResults
    from nearsight.train.integrity import joined

    declare_all()
    began = time.perf_counter()
    dataset, dense = options.load_both()
    opened = options.frozen(options.seed, image_size=options.image_size)
    probes = AllProbes(options, dataset, dense, out, stop)
    found, certificates, plan = [], [], None
    for origin, one in zip(origins.models, opened, strict=True):
        frozen = replace(one, label=origin.label or one.label)
        plan = plan or _write_plan(origins, out, options.reuse)  # now that something can be probed
        # Segmentation may change the model, so what it is has to be said before.
        described, stored = _described(frozen, origin), list(probes.of(frozen))
        found.append((described, list(_rows(stored))))
        certificates += [probe.told.get(PROVENANCE, {}) for probe in stored]
    results = ProbeResults.of(found, name=origins.name, scale=origins.scale, planned=origins.planned, plan=plan)
    write_probe_report(results, out)
    certificate = {**joined(certificates, ("commit", "versions", "hardware")), "seed": options.seed}
    command = shlex.join(["nearsight", "probe", "all", *arguments])
    seconds = round(time.perf_counter() - began, 3)
    write_json(out / "provenance.json", {**certificate, "command": command, "seconds": seconds})
    write_folder_page(out)
    print(json.dumps({"folder": str(out), **results.as_json()}) if options.json else _as_text(results, out))
    return 0


def _write_plan(origins: Origins, out: Path, reuse: Sequence[Path]) -> Plan:
    """What is claimed of probed models, written down before the first of them is probed, here or in the folders whose
    results are taken."""
    from nearsight.report.studies import PROBES as ALL
    from nearsight.report.studies import report_of
    from nearsight.study.plan import Plan, write_plan

    return write_plan(
        out,
        report_of(ALL).plan(),
        conditions=list(dict.fromkeys(origin.condition for origin in origins.models if origin.condition is not None)),
        seeds=sorted({origin.seed for origin in origins.models if origin.seed is not None}),
        finished=lambda: sum(len(list((folder / RESULTS).glob("*.json"))) for folder in (out, *reuse)),
        others=[entry for folder in reuse if (plan := Plan.read(folder)) for entry in plan.entries],
        is_alone=True,
    )


def _described(frozen: FrozenModel, origin: Origin) -> ProbedModel:
    from nearsight.report.probes import ProbedModel
    from nearsight.train import RunFolder

    trained = RunFolder(Path(origin.text)) if Path(origin.text).is_dir() else None
    return ProbedModel(
        model=frozen.label,
        condition=origin.condition or "",
        seed=origin.seed,
        num_parameters=sum(weight.numel() for weight in frozen.model.parameters()),
        image_size=max(frozen.preparation.size),
        trained_on=trained.read_config().data.name if trained else "",
        **origin.ran,
    )


def _as_text(results: ProbeResults, out: Path) -> str:
    from nearsight.report.probe_tables import models_table

    table = models_table(results)
    notes = [f"Note: {note}" for note in table.notes]
    return "\n".join([table.title, table.shown.to_string(index=False), *notes, f"Tables, figures and page: {out}"])


def _rows(stored: Iterable[StoredProbe]) -> Iterator[dict[str, Any]]:
    for probe in stored:
        for measure, score in probe.scores.items():
            yield {
                "probe": probe.probe,
                "data": probe.told["data_set"]["name"],
                "measure": measure,
                **score.as_json(),
                "identity": probe.identity,
            }


def find_origins(texts: Sequence[str]) -> Origins:
    """Every model that was named, a study by its finished runs, so that seeds of one condition can be held together.

    A study says of its runs which condition and seed they are. Runs that are named one by one are grouped where they
    differ in nothing but LocAt's two parts and the seed: ViT, ViT + GAug, ViT + PRR, LocAt; so are runs of DINO and
    runs before training, which have other settings, but the same model and data set. Other models stand alone.
    """
    studies = [text for text in texts if (Path(text) / "study.json").is_file()]
    if not studies:
        models, folder = _grouped(texts), "-and-".join(map(short_name, texts))[:100]
        conditions = " and ".join(dict.fromkeys(model.condition for model in models if model.condition))
        name = conditions or (folder if len(texts) == 1 else f"{len(texts)} models")
        return Origins(name=name, folder=folder, models=models)
    if len(texts) > 1:
        raise InputError(f"{studies[0]} is a study; name it on its own, or name its runs")
    return _of_study(Path(studies[0]))


def _of_study(folder: Path) -> Origins:
    from nearsight.study.results import read_description, run_folder
    from nearsight.study.run_tables import read_run

    described = read_description(folder)
    done = []
    for cell in described["cells"]:
        run = run_folder(folder, cell["run"])
        if run.is_complete and run.model.is_file():
            ran = {}
            with suppress(InputError):  # what is left of it may be its weights alone
                found = read_run(run)
                ran = {"min_mad": found.row["min_mad"], "epoch_seconds": float(found.history["seconds"].median())}
            done.append(Origin(text=str(run.path), condition=cell["condition"], seed=cell["seed"], ran=ran))
    if not done:
        raise InputError(f"{folder} has no finished run with its weights, so there is nothing to probe; run it first")
    planned = tuple(dict.fromkeys(cell["condition"] for cell in described["cells"]))
    return Origins(
        name=described["name"],
        folder=short_name(described["name"]),
        models=tuple(done),
        scale=described["scale"],
        planned=planned,
    )


def _grouped(texts: Sequence[str]) -> tuple[Origin, ...]:
    """With conditions and seeds where all are runs that differ in nothing else, no two of them in one place."""
    from nearsight.train import RunFolder

    alone = tuple(Origin(text=text) for text in texts)
    paths = [path for text in texts if (path := run_path(text)) is not None]
    if not 1 < len(texts) == len(paths):
        return alone
    found, rest, shared = [], [], []
    for text, path in zip(texts, paths, strict=True):
        settings = RunFolder(path).read_settings()
        settings.pop("identity", None)
        config: dict[str, Any] = settings.get("config", {})
        model: dict[str, Any] = config.get("model", {})
        if "seed" not in config or model.get("name") != ModelConfig.name:
            return alone
        # Runs from before LocAt was there do not say that they have none.
        parts = tuple(bool(model.pop(part, False)) for part in ("gaug", "prr"))
        kind = "untrained " if text.startswith(UNTRAINED) else "DINO " if "dino" in settings else ""
        condition = kind + _NAMES[parts[0], parts[1]]
        found.append(Origin(text=text, condition=condition, seed=config.pop("seed")))
        data: dict[str, Any] = config.get("data") or {}
        shared.append((model, data.get("name"), data.get("image_size")))
        rest.append((kind, {"model": model, "data": data} if text.startswith(UNTRAINED) else settings))
    places = [(origin.condition, origin.seed) for origin in found]
    same = all(dict(rest)[kind] == settings for kind, settings in rest) and all(one == shared[0] for one in shared)
    return tuple(found) if same and len(set(places)) == len(places) else alone
