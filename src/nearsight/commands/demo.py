"""`nearsight demo`: see locality, induce it, and understand where it comes from, in three minutes on a laptop."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsight.commands.options import Common, Request, parse, stoppable
from nearsight.errors import check_at_least

if TYPE_CHECKING:
    import torch

    from nearsight.commands.measured import Measured
    from nearsight.report.inputs import ModelHeads
    from nearsight.report.page.document import Section
    from nearsight.study import Simulation, SimulationResults, Study
    from nearsight.train import Stop

SEEN = {
    "Baseline": "compact_vit.baseline_cifar100",
    "Modern": "compact_vit.modern_cifar100",
    "LocAt": "locat_compact_vit.modern_cifar100",
}
"""What the shipped models are called here, and their names."""
PLAIN, LOCAT, PATCHES = "plain", "LocAt", "pairs of patches"
BY_CONSTRUCTION = (
    "This locality is induced by construction: LocAt adds a Gaussian around every patch to its attention, so it shows "
    "that the mechanism works, not that training found locality by itself."
)
CAVEATS = (
    "Each model is one training run, and of Modern's three the one with the most local head is shipped: its card says "
    "so (nearsight/models/zoo/README.md).",
    "LocAt's locality is built in; whether it is worth having, its accuracy and its features have to say.",
    "The two models trained here are small, their images synthetic, their learning rate one at which the effect shows "
    "within minutes, and the patches of the last part are made up.",
)
STRUCTURE = (
    "Ten patches in five pairs; which belong together is not told. In every sample one pair carries the label, and a "
    "model whose attention knows positions alone is trained on the labels (Jelassi et al. 2022, simplified as in their "
    "proof)."
)
NEXT = {
    "nearsight measure compact_vit.modern_cifar100 --what offsets,shares": "one model, and more of what its heads do",
    "nearsight study run association": "the last part in full: ten seeds, every claim of its paper judged",
    "nearsight measure vit_small_patch16_224 --pretrained --images FOLDER": "any ViT of timm, on your own pictures",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Common):
    """See, induce and understand locality: measure three trained models, train two, and watch one find structure.

    See: three compact ViTs that come with nearsight, on images that come with it too. Induce: a small ViT trained
    plain and with LocAt. Understand: gradient descent finds out which patches belong together. All of it is on one
    page. Stopped or killed, it continues when the same command is given again.
    """

    out: Path = Path("runs/demo")
    """Folder for the tables, the runs, the figures and the page."""
    seed: int = 0
    """Seed of the two models that are trained."""
    epochs: int = 7
    """Training epochs of each."""
    num_train: int = 4500
    """Training images, a fifth of which is held out for validation."""
    steps: int = 200
    """Steps of gradient descent in the last part."""

    def __post_init__(self) -> None:
        check_at_least("--num-train", self.num_train, 100)  # without those for validation, more than a batch


def main(arguments: Sequence[str]) -> int:
    options = parse(DemoOptions, arguments, prog="nearsight demo")
    command = shlex.join(["nearsight", "demo", *arguments])
    return stoppable(lambda stop: _demonstrate(options, command, stop))


def _demonstrate(options: DemoOptions, command: str, stop: Stop) -> int:
    from nearsight.commands.measured import explore, write_all, write_page_of
    from nearsight.files import check_kind, output_folder

    device = options.torch_device
    runs, simulation = _planned(options)
    check_kind(options.out, None)
    output_folder(options.out)
    say = partial(print, flush=True, file=None if not options.json else sys.stderr)

    say("1. See: three compact ViTs trained on CIFAR-100, on 200 of its test images\n")
    measured, sections = _see(options, device)
    write_all(options.out, measured, command, sections, explorer := explore(measured))
    models = [one.heads for one in measured]
    page = options.out / "report.html"
    say(_seen_in_words(models), f"\nPage: {page} (it grows)\n", sep="\n")

    say("2. Induce: a small ViT on synthetic shapes, plain and with LocAt\n")
    trained = _induce(runs, options, device, stop)
    sections.append(_induced_section(trained))
    say("", *_induced_in_words(trained), "", sep="\n")

    say("3. Understand: which patches belong together? Gradient descent is told the loss alone\n")
    results = _understand(simulation, options, device, stop)
    sections.append(_understood_section(results))
    say("", _understood_in_words(results), "", sep="\n")

    write_page_of(options.out, measured, command, explorer, sections)
    if options.json:
        print(json.dumps(_as_json(models, trained, results, page)))
        return 0
    print("What you saw", *(f"- {line}" for line in _closing(models, trained, results)), sep="\n")
    print("\nWhat this does not show", *(f"- {line}" for line in CAVEATS), sep="\n")
    print("\nNext", *(f"  {typed}\n      {about}" for typed, about in NEXT.items()), f"\nPage: {page}", sep="\n")
    return 0


def _planned(options: DemoOptions) -> tuple[Study, Simulation]:
    """What is trained and simulated: a mistake in the options is found before anything is written."""
    from nearsight.papers.structure.simulated import simulation_of
    from nearsight.study import OFF, Study
    from nearsight.train.recipes import demo_run
    from nearsight.train.structure import Descent, StructureRun

    base = demo_run(seed=options.seed, epochs=options.epochs, num_train=options.num_train)
    levels = {PLAIN: OFF, LOCAT: {"gaug": True, "prr": True}}
    study = Study(base, factors={"model": levels}, seeds=(options.seed,), name="demo")
    run = StructureRun(descent=Descent(steps=options.steps))
    return study, replace(simulation_of({PATCHES: run}, seeds=5, keep=("curves", "attention")), name="demo")


def _see(options: DemoOptions, device: torch.device) -> tuple[list[Measured], list[Section]]:
    """The shipped models measured, and where each head looks as sections of the page."""
    from nearsight.commands.further import look_further
    from nearsight.commands.measured import Measured
    from nearsight.commands.measuring import measure_shown, prepare
    from nearsight.lens.running import remembering_surveys
    from nearsight.models import zoo

    what, measured = ["offsets"], []
    with remembering_surveys():
        for label, one in zip(SEEN, prepare(Request(models=tuple(SEEN.values())), (), device), strict=True):
            one = replace(one, subject=replace(one.subject, label=label))
            table = measure_shown(one, "auto", what, device)
            seen = Measured.of(one.subject, table, list(one.layers.values()), options.out / label.lower(), device)
            accuracy = json.loads((zoo.folder(SEEN[label]) / "result.json").read_text())["test_acc"]
            measured.append(replace(seen, heads=replace(seen.heads, test_accuracy=accuracy)))
        return measured, look_further(measured, what, device).sections()


def _seen_in_words(models: Sequence[ModelHeads]) -> str:
    from nearsight.report.differences import most_local_head
    from nearsight.report.reading import compare_with_first

    heads = [most_local_head(model) for model in models]
    uniform = heads[0].uniform
    rows = [
        f"  {model.label:<10} {model.test_accuracy:>8.1%}   {head.mean:>8.3f}  (layer {head.layer}, head {head.head})"
        for model, head in zip(models, heads, strict=True)
    ]
    return "\n".join(
        [
            "             test acc.   mean attention distance (MAD) of the most local head",
            *rows,
            f"\nMAD is in diagonals of the image: 0 is the own patch, {uniform:.3f} is uniform attention.",
            *(reading.headline for reading in compare_with_first(models)),
        ]
    )


def _induce(study: Study, options: DemoOptions, device: torch.device, stop: Stop) -> list[ModelHeads]:
    """Both models trained. Their weights differ in shape, so they cannot be one stack: on a CPU each has a process."""
    from nearsight.commands.study_progress import StudyProgress
    from nearsight.report.page.folders import heads_on_grid
    from nearsight.study import run_study
    from nearsight.study.executors import LocalExecutor, ProcessesExecutor

    executor = ProcessesExecutor(device=device, workers=2) if device.type == "cpu" else LocalExecutor(device=device)
    with StudyProgress("Induce") as progress:
        folder = run_study(
            study,
            options.out / "induce",
            executor=executor,
            data_dir=options.data_dir,
            listener=progress,
            stop=stop,
        )
    return [heads_on_grid(folder.run_folder(cell.run), cell.condition) for cell in study.cells]


def _induced_section(trained: Sequence[ModelHeads]) -> Section:
    from nearsight.report.figures.models import locality_courses
    from nearsight.report.page.document import Section, figure_html

    words = _induced_in_words(trained)
    caption = (
        "The mean attention distance (MAD) of the most local head, in diagonals of the image, and the validation "
        "accuracy, after every epoch, plain and with LocAt. Dotted: uniform attention. One run each."
    )
    drawn = figure_html("induce", locality_courses(trained), " ".join(words), caption)
    return Section(name="induce", heading="Induce: trained here, plain and with LocAt", body=_paragraphs(words) + drawn)


def _induced_in_words(trained: Sequence[ModelHeads]) -> list[str]:
    plain, local = trained
    return [
        f"The most local head of the plain ViT ends at {_most_local(plain):.3f}, of that with LocAt at "
        f"{_most_local(local):.3f}; "
        f"test accuracy {plain.test_accuracy:.1%} and {local.test_accuracy:.1%} (chance 10.0%).",
        BY_CONSTRUCTION,
    ]


def _understand(simulation: Simulation, options: DemoOptions, device: torch.device, stop: Stop) -> SimulationResults:
    from nearsight.commands.study_progress import SimulationProgress
    from nearsight.study import SimulationResults, run_simulation

    with SimulationProgress("Understand", simulation.responses) as progress:
        folder = run_simulation(simulation, options.out / "understand", device=device, listener=progress, stop=stop)
    return SimulationResults.read(folder.path)


def _understood_section(results: SimulationResults) -> Section:
    from nearsight.papers.structure.simulated import attention_matrices
    from nearsight.report.page.document import Section, figure_html

    words, drawing = _understood_in_words(results), attention_matrices(results)
    drawn = figure_html("understand", drawing.figure, words, drawing.caption)
    heading = "Understand: which patches belong together?"
    return Section(name="understand", heading=heading, body=_paragraphs([STRUCTURE, words]) + drawn)


def _understood_in_words(results: SimulationResults) -> str:
    runs = results.runs
    found = runs[runs["exact"] == 1]
    words = f"In {len(found)} of {len(runs)} seeds attention joins every patch with its partner"
    return f"{words}, from step {found['exact_from'].max():.0f} on at the latest." if len(found) else f"{words}."


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _closing(models: Sequence[ModelHeads], trained: Sequence[ModelHeads], results: SimulationResults) -> list[str]:
    """What was seen, in one sentence per part, from its numbers alone."""
    baseline, modern, locat = (_most_local(model) for model in models)
    plain, local = (_most_local(model) for model in trained)
    return [
        "See: the same network, trained three ways. Its most local head has a distance of "
        f"{baseline:.3f} with Baseline, {modern:.3f} with Modern and {locat:.3f} with LocAt.",
        f"Induce: trained here, the most local head has {plain:.3f} in the plain ViT and {local:.3f} with LocAt. "
        "Induced by construction.",
        f"Understand: {_understood_in_words(results)[0].lower()}{_understood_in_words(results)[1:]}",
    ]


def _most_local(model: ModelHeads) -> float:
    from nearsight.report.differences import most_local_head

    return most_local_head(model).mean


def _as_json(
    models: Sequence[ModelHeads], trained: Sequence[ModelHeads], results: SimulationResults, page: Path
) -> dict[str, Any]:
    def numbers(some: Sequence[ModelHeads]) -> dict[str, dict[str, Any]]:
        return {one.label: {"min_mad": _most_local(one), "test_acc": one.test_accuracy} for one in some}

    exact = results.runs[["seed", "exact", "exact_from"]].astype(object)
    return {
        "see": numbers(models),
        "induce": numbers(trained),
        "understand": exact.where(exact.notna(), None).to_dict(orient="records"),
        "sentences": _closing(models, trained, results),
        "report": str(page),
    }
