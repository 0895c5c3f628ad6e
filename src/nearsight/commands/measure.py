"""`nearsight measure MODEL …`: the heads of a run or of any ViT, alone or side by side: tables, figures and a page."""

import inspect
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearsight.commands.batching import find_batch_size, within_memory
from nearsight.commands.engines import DEFAULT_ADDRESS, Engine, check_engine
from nearsight.commands.measuring_shards import Prepared, ShardMeasuring, Watch, check_sharding, shards_of
from nearsight.commands.options import parse
from nearsight.commands.progress import MeasuringProgress
from nearsight.commands.subjects import Request, Subject, folders_of, open_subjects, short_name
from nearsight.commands.what import about_what, check_what, in_the_table
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.files import check_output_folder
from nearsight.kinds import MEASURED, check_kind
from nearsight.lens import HeadTable, Shards, measure, patch_grid, position_gram
from nearsight.lens.running import remembering_surveys
from nearsight.study.executors.ray_cluster import check_device, import_ray
from nearsight.train.provenance import provenance

if TYPE_CHECKING:
    from nearsight.commands.measured import Measured
    from nearsight.report import ModelHeads


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(Request):
    """Measure how far and how selectively each attention head of one or more models looks.

    Writes heads.csv and heads.npz, three figures and report.html; several models are compared, and their tables are in
    a folder each. What an earlier call has left in the folder is replaced. A run is measured on its own test images
    unless --images says otherwise. What --what adds per head or layer goes to extra-heads.csv and extra-layers.csv, all
    else to files of its own name; figures and sentences about it are on the page, too.
    """

    layers: tuple[str, ...] = ()
    """Layers to keep, by number (from 0, as in heads.csv; from the end if negative) or by name."""
    what: tuple[str, ...] = ()
    """More to see: any of the names above."""
    batch_size: str = "auto"
    """Images per forward, or auto: as many as memory takes."""
    out: Path | None = None
    """Where to write; for a run on its own images the run folder itself, else runs/measure-MODEL."""
    shards: int | None = None
    """Divide each model's images into so many shards. Those that are done are kept: what was killed goes on there."""
    shard: int | None = None
    """Measure this shard alone (from 0) and write no report, as one of many jobs; without it, what is missing."""
    engine: Engine = "local"
    """Who measures the shards: this process, several of this machine, or a Ray cluster."""
    workers: int | None = None
    """Of the engine processes: how many; by default one per GPU, or on a CPU one per core, with one thread."""
    address: str = DEFAULT_ADDRESS
    """Of the engine ray: auto (the cluster that runs here), local (a new one of this machine), or HOST:PORT."""


def main(arguments: Sequence[str]) -> int:
    description = f"{inspect.getdoc(MeasureOptions)}\n\n{about_what()}"
    options = parse(MeasureOptions, arguments, prog="nearsight measure", description=description)
    _check(options)
    with remembering_surveys():  # of a first look, of trials of batch sizes, of the table and of the page
        return _run(options, arguments)


def _run(options: MeasureOptions, arguments: Sequence[str]) -> int:
    out = options.out or _default_folder(options)
    check_output_folder(out)
    if len(options.models) == 1 and out != Path(options.models[0]):  # a run keeps its own table; several have none
        check_kind(out, MEASURED)
    device = options.torch_device
    what = check_what(options.what, len(options.models))
    check_engine(options.engine, workers=options.workers, address=options.address)
    check_sharding(options.shards, options.shard, options.engine, options.workers, what)
    if options.engine == "ray":
        check_device(options.device)
        import_ray()
    prepared = _prepare(options, device)
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.commands.further import look_further
    from nearsight.commands.measured import as_json, as_text, write_all

    subjects = [one.subject for one in prepared]
    folders = folders_of(options.models, out)
    if "positions" in what:
        # They need no image: a model without them is refused before any is measured.
        for subject in subjects:
            position_gram(subject.model)
    if options.shards is None:
        tables = [_measure_shown(one, options.batch_size, in_the_table(what), device) for one in prepared]
    else:
        divided = [
            shards_of(one, in_the_table(what), options.shards, folder)
            for one, folder in zip(prepared, folders, strict=True)
        ]
        _measure_shards(options, prepared, divided, device)
        if options.shard is not None:
            _say_shard(divided, options.shard, as_object=options.json)
            return 0
        tables = [shards.merged() for shards in divided]
    measured = [
        _measured(one, table, folder, device) for one, table, folder in zip(prepared, tables, folders, strict=True)
    ]
    further = look_further(measured, what, device)
    files = write_all(out, measured, shlex.join(["nearsight", "measure", *arguments]), further.sections())
    files += [path for one in measured for path in one.write_extra_tables(what)]
    files += (more := further.write(out))
    if options.json:
        print(json.dumps(as_json(measured, files)))
        return 0
    print("\n".join([*as_text(out, measured), *(f"Also: {path}" for path in more if path.suffix != ".svg")]))
    for sentences in further.sentences.values():
        print(*sentences, sep="\n")
    return 0


def _check(options: MeasureOptions) -> None:
    if not options.models:
        raise InputError("no model is named; write nearsight measure MODEL, and see nearsight measure --help")
    check_at_least("--num-images", 1 if options.num_images is None else options.num_images, 1)
    if options.batch_size != "auto" and not (options.batch_size.isdecimal() and int(options.batch_size) > 0):
        raise InputError(f"--batch-size is {options.batch_size}, but must be a number from 1 on, or auto")


def _default_folder(options: MeasureOptions) -> Path:
    first, *others = options.models
    as_trained = options.images is None and options.num_images is None and not options.layers and not options.shards
    if not others and Path(first).is_dir() and as_trained:  # else its own table would be replaced by another one
        return Path(first)
    end = f"-and-{short_name(others[0])}" if len(others) == 1 else f"-and-{len(others)}-more" if others else ""
    return Path("runs") / f"measure-{short_name(first)}{end}"


def _prepare(options: MeasureOptions, device: torch.device) -> list[Prepared]:
    """The models, opened, and one image through each: what does not work is known before the first is measured."""
    prepared = []
    # Of shards, everybody looks at some: to decode all of them everywhere would take longer than to measure.
    for subject in open_subjects(options, device, all_decoded=options.shards is None):
        first_look = _first_look(subject, device)
        layers = _choose_layers(options.layers, first_look, subject.label)
        prepared.append(Prepared(subject=subject, layers=layers, first_look=first_look))
    return prepared


def _look(
    subject: Subject,
    images: Iterable[Tensor],
    batch_size: int,
    layers: Sequence[str] | None,
    what: Sequence[str],
    device: torch.device,
) -> HeadTable:
    """The one place where a model is measured: whatever else is to be seen of it is asked for here."""
    return measure(
        subject.model,
        images,
        batch_size=batch_size,
        layers=layers,
        device=device,
        precision=subject.precision,
        what=what,
    )


def _first_look(subject: Subject, device: torch.device) -> HeadTable:
    image = next(subject.images.batches(1))
    return within_memory(lambda size: _look(subject, [image], size, None, (), device), 1, may_shrink=True)


def _choose_layers(asked: Sequence[str], first_look: HeadTable, label: str) -> dict[str, int]:
    """The layers to measure, by name, and their numbers among all of the model's."""
    number_of = {name: number for number, name in enumerate(first_look.layer_names)}
    names = [name for text in asked for name in text.replace(",", " ").split()]
    if not names:
        return number_of
    chosen = {}
    for name in names:
        if re.fullmatch(r"-?\d+", name) and name not in number_of:
            number = int(name)
            if not -len(number_of) <= number < len(number_of):
                last = len(number_of) - 1
                raise InputError(f"--layers {number}: the layers of {label} count from 0 to {last}")
            name = first_look.layer_names[number]
        elif name in first_look.skipped:
            raise InputError(f"--layers {name}: {label} has it, but it is not measured ({first_look.skipped[name]})")
        elif name not in number_of:
            raise unknown_name(f"layer of {label}", name, number_of)
        chosen[name] = number_of[name]
    return dict(sorted(chosen.items(), key=lambda item: item[1]))


def _measure(
    one: Prepared,
    batch_size: str,
    what: Sequence[str],
    device: torch.device,
    watch: Watch,
) -> HeadTable:
    subject, names = one.subject, list(one.layers)

    def try_some(num_images: int) -> HeadTable:
        return _look(subject, [next(subject.images.batches(num_images))], num_images, names, what, device)

    if batch_size == "auto":
        size = subject.batch_size or find_batch_size(try_some, subject.image_size, device)
    else:
        size = int(batch_size)
    return within_memory(
        lambda size: _look(subject, watch(subject.images.batches(size)), size, names, what, device),
        min(size, len(subject.images)),
        may_shrink=batch_size == "auto",
    )


def _measure_shown(one: Prepared, batch_size: str, what: Sequence[str], device: torch.device) -> HeadTable:
    with MeasuringProgress(one.subject.label, len(one.subject.images)) as progress:
        return _measure(one, batch_size, what, device, progress.counted)


def _measure_shards(
    options: MeasureOptions, prepared: Sequence[Prepared], divided: Sequence[Shards], device: torch.device
) -> None:
    """Those that are missing, or of these the one that is asked for."""
    measuring = ShardMeasuring(
        options=options, batch_size=options.batch_size, divided=divided, prepare=_prepare, measure=_measure
    )
    jobs = measuring.missing([one.subject.label for one in prepared], options.shard)
    if options.engine == "processes":
        measuring.in_processes(jobs, device, options.workers)
    elif options.engine == "ray":
        measuring.on_ray(jobs, options.device, options.address)
    else:
        measuring.here(prepared, jobs, device)


def _say_shard(divided: Sequence[Shards], shard: int, *, as_object: bool) -> None:
    files = [str(shards.path(shard)) for shards in divided]
    if as_object:
        print(json.dumps({"shard": shard, "num_shards": divided[0].num_shards, "files": files}))
    else:
        print(*(f"Shard {shard} of {divided[0].num_shards}: {path}" for path in files), sep="\n")


def _measured(one: Prepared, table: HeadTable, folder: Path, device: torch.device) -> "Measured":
    from nearsight.commands.measured import Measured

    numbers = [one.layers[name] for name in table.layer_names]
    heads = _heads(one.subject, table, numbers, device)
    return Measured(subject=one.subject, table=table, heads=heads, layers=numbers, folder=folder)


def _heads(subject: Subject, table: HeadTable, numbers: Sequence[int], device: torch.device) -> "ModelHeads":
    """A subject's heads for the report, with the numbers its layers have in the whole model."""
    from nearsight.report import ModelHeads
    from nearsight.report.inputs import model_heads

    frame = table.to_frame()
    frame = frame.assign(layer=[numbers[place] for place in frame["layer"]], epoch=subject.epoch)
    grids = _grids(subject, table, numbers)
    if subject.run is not None:
        return replace(model_heads(subject.run, subject.label, heads=frame), grids=grids)
    return ModelHeads(
        label=subject.label, heads=frame, grids=grids, config=subject.config, provenance=provenance(device)
    )


def _grids(subject: Subject, table: HeadTable, numbers: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """Rows and columns of each layer's tokens, where they are known."""
    if "grid_size" in table.extra:
        grids = table.extra["grid_size"].astype(int).tolist()
        return {number: (rows, columns) for number, (rows, columns) in zip(numbers, grids, strict=True)}
    grid_size = patch_grid(subject.model)
    return None if grid_size is None else dict.fromkeys(numbers, grid_size)
