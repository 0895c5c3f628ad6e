"""`nearsight probe all MODEL …`: every probe of one model, of several, or of all runs of a study, and one table."""

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsight.commands.frozen import open_frozen
from nearsight.commands.options import parse
from nearsight.commands.probing_all import AllProbes, AllRequest
from nearsight.commands.probing_origins import Origin, Origins, find_origins
from nearsight.commands.probing_reused import PROVENANCE
from nearsight.commands.signals import stoppable
from nearsight.errors import InputError
from nearsight.files import check_output_folder, write_json
from nearsight.kinds import PROBES, check_kind
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.scores import StoredProbe
from nearsight.train import RunFolder, Stop
from nearsight.train.provenance import joined

if TYPE_CHECKING:
    from nearsight.report.probes import ProbedModel, ProbeResults


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
    origins = find_origins(options.models)
    out = options.out or Path("runs") / f"probes-{origins.folder}"
    check_output_folder(out)
    check_kind(out, PROBES)
    if origins.scale == "small" and "results" in out.resolve().parts:
        raise InputError(f"{out} is for results, and a study at small scale has none; choose another --out")
    options = replace(options, models=tuple(origin.text for origin in origins.models))
    return stoppable(lambda stop: _probe_all(options, origins, out, arguments, stop))


def _probe_all(options: AllOptions, origins: Origins, out: Path, arguments: Sequence[str], stop: Stop) -> int:
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.report.page.folders import write_folder_page
    from nearsight.report.probes import ProbeResults, write_probe_report

    began = time.perf_counter()
    dataset, dense = options.load_both()
    opened = open_frozen(
        options.models,
        pretrained=options.pretrained,
        checkpoint=options.checkpoint,
        seed=options.seed,
        device=options.torch_device,
        image_size=options.image_size,
    )
    probes = AllProbes(options, dataset, dense, out, stop)
    found, certificates = [], []
    for origin, one in zip(origins.models, opened, strict=True):
        frozen = replace(one, label=origin.label or one.label)
        # Segmentation may change the model, so what it is has to be said before.
        described, stored = _described(frozen, origin), list(probes.of(frozen))
        found.append((described, list(_rows(stored))))
        certificates += [probe.told.get(PROVENANCE, {}) for probe in stored]
    results = ProbeResults.of(found, name=origins.name, scale=origins.scale, planned=origins.planned)
    write_probe_report(results, out)
    certificate = {**joined(certificates, ("commit", "versions", "hardware")), "seed": options.seed}
    command = shlex.join(["nearsight", "probe", "all", *arguments])
    seconds = round(time.perf_counter() - began, 3)
    write_json(out / "provenance.json", {**certificate, "command": command, "seconds": seconds})
    write_folder_page(out)
    print(json.dumps({"folder": str(out), **results.as_json()}) if options.json else _as_text(results, out))
    return 0


def _described(frozen: FrozenModel, origin: Origin) -> "ProbedModel":
    from nearsight.report.probes import ProbedModel

    trained = RunFolder(Path(origin.text)) if Path(origin.text).is_dir() else None
    return ProbedModel(
        model=frozen.label,
        condition=origin.condition or "",
        seed=origin.seed,
        num_parameters=sum(weight.numel() for weight in frozen.model.parameters()),
        image_size=max(frozen.preparation.size),
        trained_on=trained.read_config().data.name if trained else "",
    )


def _as_text(results: "ProbeResults", out: Path) -> str:
    from nearsight.report.probes.tables import models_table

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
