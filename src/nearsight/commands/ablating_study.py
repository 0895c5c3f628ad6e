"""How `nearsight ablate STUDY` asks every finished run of a study, and puts what it finds beside that of the others."""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nearsight.commands.ablate import AblateOptions
from nearsight.commands.ablating import PARTS, ask
from nearsight.commands.probe_all import Origins, find_origins
from nearsight.errors import InputError
from nearsight.files import ABLATED, read_object, write_json
from nearsight.papers import declare_all
from nearsight.probe import Ablation
from nearsight.report.ablated import AblatedRuns, changed, rows_of
from nearsight.report.ablated_tables import ablated_verdicts, conditions_table, write_ablated_report
from nearsight.report.ablation import Kind
from nearsight.report.page.folders import write_folder_page
from nearsight.report.studies import report_of
from nearsight.study.plan import write_plan
from nearsight.train import RunFolder
from nearsight.train.integrity import joined, provenance

_KINDS: Mapping[str, Kind] = {"heads": "head", "reach": "reach", "removal": "removal"}
"""What is asked → the kind of its rows."""
_CERTIFICATE = "provenance.json"


def ask_study(options: AblateOptions, reaches: Sequence[float], out: Path, command: str) -> str:
    """Ask what is missing, run by run, and write everything; what is printed of it.

    The tables are whole after each run, so that an interruption costs what is known of one run at most, of which
    finished batches are kept.
    """
    declare_all()
    origins = find_origins((options.model,))
    found = AblatedRuns.read(out) if (out / ABLATED).exists() else None
    if found is not None and found.name != origins.name:
        raise InputError(f"{out} is about {found.name}, not about {origins.name}; choose another --out")
    _write_plan(origins, found, out)
    for number, origin in enumerate(origins.models, start=1):
        folder = RunFolder(Path(origin.text))
        run = folder.read_config().identity
        missing = [what for what in options.asked if found is None or run not in found.asked(_KINDS[what])]
        if not missing:
            continue
        print(f"{origin.label} ({number} of {len(origins.models)}): {', '.join(missing)}", file=sys.stderr)
        one = replace(options, model=origin.text, what=tuple(missing))
        ablation = ask(one, one.request, reaches, out).report.found
        found = found or AblatedRuns.none_of(origins.name, origins.scale, origins.planned, _grid(ablation))
        about = {"run": run, "condition": origin.condition, "seed": origin.seed, "base": ablation.score}
        about["num_images"] = len(ablation.tried.base_N)
        for kind in (_KINDS[what] for what in missing):
            found = found.joined(kind, rows_of(ablation.to_frame(kind), kind, about))
        _write_certificate(out, {**provenance(one.request.torch_device), "commands": [command]}, run, folder.model)
        found.write(out)
        shutil.rmtree(out / PARTS, ignore_errors=True)
    assert found is not None  # a study without finished runs was refused
    found = AblatedRuns.read(out)  # as whoever comes later finds it
    write_ablated_report(found, out)
    write_folder_page(out)
    if options.json:
        runs = json.loads(found.as_study().runs.drop(columns="trained").to_json(orient="records"))
        return json.dumps({"folder": str(out), "name": found.name, "runs": runs})
    table, verdicts = conditions_table(found), ablated_verdicts(found)
    said = [] if verdicts is None else [verdicts.summary()]
    return "\n".join([table.title, table.shown.to_string(index=False), *said, f"Tables, figures and page: {out}"])


def _write_plan(origins: Origins, found: AblatedRuns | None, out: Path) -> None:
    """What is to be judged, if anything is, before anything is asked."""
    if claims := report_of(changed(origins.name)).plan():
        seeds = sorted({origin.seed for origin in origins.models if origin.seed is not None})
        num_asked = 0 if found is None else len(found.as_study().runs)
        write_plan(out, claims, conditions=origins.planned, seeds=seeds, finished=lambda: num_asked, is_alone=True)


def _grid(ablation: Ablation) -> tuple[int, int]:
    grids = {site.geometry.grid_size for site in ablation.tried.found.sites.values()}
    if len(grids) > 1:
        raise InputError("layers of these runs have several grids of patches; ask run by run")
    return grids.pop()


def _write_certificate(out: Path, own: Mapping[str, object], run: str, weights: Path) -> None:
    """What made the tables, of all calls on all machines; and of which weights they are."""
    path = out / _CERTIFICATE
    before = read_object(path, missing=str(path)) if path.exists() else {}
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    made_by = joined([*([before] if before else []), own], ("commit", "versions", "hardware", "commands"))
    write_json(path, {**before, **made_by, "weights_sha256": {**before.get("weights_sha256", {}), run: digest}})
