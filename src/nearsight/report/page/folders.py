"""From a folder to its page: what kind of folder it is, and what is in it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearsight.errors import InputError
from nearsight.files import ABLATED, FINETUNED, MEASURED, PROBES, RUN, STUDY, mark_of, read_object, write_text
from nearsight.lens import patch_grid
from nearsight.models import load_model
from nearsight.report.inputs import ModelHeads, model_heads, read_measured
from nearsight.report.page.document import PAGE, BodyPart, Section
from nearsight.study import SimulationResults, StudyResults, is_simulation
from nearsight.train import RunFolder
from nearsight.train.recipes import command_of

if TYPE_CHECKING:
    from nearsight.report.ablated import AblatedRuns
    from nearsight.report.probes import ProbeResults

Kind = Literal["simulation", "study", "probes", "ablated", "run", "measured", "several"]
_KINDS: dict[str, Kind] = {PROBES: "probes", ABLATED: "ablated", RUN: "run", MEASURED: "measured"}
_KNOWN = (
    "a run (config.json), a study (study.json), what `nearsight measure` leaves (heads.csv), `nearsight probe all` "
    "(probes.csv) or `nearsight ablate` of a study (ablated.json), or a folder of such runs or models"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """What a page is made of: a study, a simulation, probes, changed heads, or models."""

    kind: Kind
    title: str
    study: StudyResults | None = None
    simulation: SimulationResults | None = None
    probes: "ProbeResults | None" = None
    ablated: "AblatedRuns | None" = None
    models: tuple[ModelHeads, ...] = ()
    further: tuple[Section, ...] = ()
    """Sections on these models, beside those on their heads."""
    runs: Mapping[str, Path] = field(default_factory=dict)
    """Label → folder of the models that are runs."""
    provenance: Mapping[str, Any] | None = None
    command: str | None = None

    def html(self, explorer: BodyPart | None = None) -> str:
        """The page. What draws it is loaded here, since the pages of models do without that of studies."""
        if self.models:
            from nearsight.report.page.models import common_grid, page_html

            return page_html(
                title=self.title,
                models=self.models,
                grid_size=common_grid(self.models),
                command=self.command,
                explorer=explorer,
                further=self.further,
            )
        from nearsight.report.page import results

        if self.simulation is not None:
            return results.simulation_page_html(self.simulation, provenance=self.provenance)
        if self.probes is not None:
            return results.probes_page_html(self.probes, provenance=self.provenance)
        if self.ablated is not None:
            return results.ablated_page_html(self.ablated, provenance=self.provenance)
        assert self.study is not None
        return results.study_page_html(self.study, provenance=self.provenance, explorer=explorer)


def write_folder_page(folder: Path, *, explorer: BodyPart | None = None) -> Path:
    """Write the page of a folder into it, all of it or nothing; the file."""
    write_text(folder / PAGE, read_folder(folder).html(explorer))
    return folder / PAGE


def read_folder(folder: Path) -> Contents:
    """A run, a study, probes, changed heads, a measured model, or several of the latter below one folder."""
    kind = kind_of(folder)
    if kind == "simulation":
        simulation = SimulationResults.read(folder)
        return Contents(kind=kind, title=simulation.name, simulation=simulation, provenance=_provenance(folder))
    if kind == "study":
        study = StudyResults.read(folder)
        return Contents(kind=kind, title=study.name, study=study, provenance=_provenance(folder))
    if kind == "probes":
        from nearsight.report.probes import ProbeResults

        probes = ProbeResults.read(folder)
        return Contents(kind=kind, title=probes.name, probes=probes, provenance=_provenance(folder))
    if kind == "ablated":
        from nearsight.report.ablated import AblatedRuns, changed

        ablated = AblatedRuns.read(folder)
        return Contents(kind=kind, title=changed(ablated.name), ablated=ablated, provenance=_provenance(folder))
    if kind == "several" and (finetuned := _finetuned(folder)):
        from nearsight.report.finetuned import finetuned_section, read_finetuned, seeds_section

        before, after = finetuned[0] / "before", [each / "after" for each in finetuned]
        records, models = [read_finetuned(each) for each in finetuned], read_folders([before, *after])
        if finetuned == [folder]:
            return replace(models, command=_model(before)[1], further=(finetuned_section(records[0]),))
        return replace(models, further=(seeds_section(records),))
    return read_folders(_members(folder) if kind == "several" else [folder])


def read_folders(folders: Sequence[Path]) -> Contents:
    """Runs and measured models, side by side."""
    found: list[tuple[ModelHeads, str | None]] = []
    for folder in folders:
        if (kind := kind_of(folder)) not in ("run", "measured"):
            raise InputError(f"{folder} is not a single run or measured model; name each that is to be compared")
        found.append(_model(folder))
    labels = [model.label for model, _ in found]
    names = [str(folder) if labels.count(label) > 1 else label for folder, label in zip(folders, labels, strict=True)]
    models = tuple(replace(model, label=label) for (model, _), label in zip(found, names, strict=True))
    compared = shlex.join(["nearsight", "report", "--compare", *map(str, folders)])
    return Contents(
        kind=kind if len(models) == 1 else "several",
        title=" and ".join(filter(None, [", ".join(names[:-1]), names[-1]])),
        models=models,
        runs={label: folder for label, folder in zip(names, folders, strict=True) if _is_run(folder)},
        command=found[0][1] if len(models) == 1 else compared,
    )


def kind_of(folder: Path) -> Kind:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; name {_KNOWN}")
    mark = mark_of(folder)
    if mark == STUDY:
        return "simulation" if is_simulation(folder) else "study"
    if mark is not None:
        return _KINDS[mark]
    if _members(folder) or _finetuned(folder):
        return "several"
    raise InputError(f"{folder} holds nothing to report on; name {_KNOWN}")


def _finetuned(folder: Path) -> list[Path]:
    """This folder, if `nearsight finetune` wrote it, or else those in it that it did."""
    if (folder / FINETUNED).exists():
        return [folder]
    return [path.parent for path in sorted(folder.glob(f"*/{FINETUNED}"))]


def _is_run(folder: Path) -> bool:
    return (folder / RUN).exists()


def _members(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and (path / MEASURED).exists()]


def _model(folder: Path) -> tuple[ModelHeads, str | None]:
    """A run or a measured model, and the command that makes it again."""
    if not _is_run(folder):
        measured = read_measured(folder)
        return measured.heads, measured.command
    run = RunFolder(folder)
    run.check_there("heads.csv", "history.csv")
    if run.is_complete and not run.heads.exists():  # of pretraining
        raise InputError(f"the heads of {folder} have not been measured; nearsight measure {folder} does, with a page")
    return heads_on_grid(run, folder.resolve().name), _command_of(run)


def heads_on_grid(run: RunFolder, label: str) -> ModelHeads:
    """A run's heads with the grid of its model's patches, where its weights are there to say it."""
    model = model_heads(run, label)
    grid = patch_grid(load_model(run.model)) if run.model.exists() else None
    return replace(model, grids=None if grid is None else dict.fromkeys(model.layers(), grid))


def _command_of(run: RunFolder) -> str | None:
    """What trains a run again: the command or, where its options cannot say it, Python from its config.json."""
    if run.is_pretraining:  # which has more in it
        return None
    try:
        if (command := command_of(run.read_config())) is not None:
            return command
    except InputError:  # of another version
        return None
    again = (
        "from pathlib import Path; from nearsight.train import RunFolder, train_run; "
        f"train_run(RunFolder(Path({str(run.path)!r})).read_config(), Path({f'{run.path}-again'!r}))"
    )
    return shlex.join(["python", "-c", again])


def _provenance(folder: Path) -> dict[str, Any] | None:
    path = folder / "provenance.json"
    # A study that is not done has none.
    return read_object(path, missing=str(folder)) if path.exists() else None
