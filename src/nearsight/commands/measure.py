"""`nearsight measure MODEL …`: the heads of a run or of any ViT, alone or side by side: tables, figures and a page."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.commands.options import DEFAULT_ADDRESS, Engine, Request, check_engine, folders_of, parse, short_name
from nearsight.errors import InputError, check_at_least
from nearsight.files import MEASURED, check_kind, check_output_folder
from nearsight.lazy import torch
from nearsight.lens import WHAT

if TYPE_CHECKING:
    from nearsight.commands.measuring import Prepared
    from nearsight.lens import Shards


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
    """Where to write; for a run on its own images the run folder itself, otherwise runs/measure-MODEL."""
    shards: int | None = None
    """Divide each model's images into so many shards. Those that are done are kept: what was killed goes on there."""
    shard: int | None = None
    """Measure this shard alone (from 0) and write no report, as one of many jobs; without it, what is missing."""
    engine: Engine = "local"
    """What measures the shards: this process, several of this machine, or a Ray cluster."""
    workers: int | None = None
    """Of the engine processes: how many; by default one per GPU, or on a CPU one per core, with one thread."""
    address: str = DEFAULT_ADDRESS
    """Of the engine ray: auto (the cluster that runs here), local (a new one of this machine), or HOST:PORT."""


def main(arguments: Sequence[str]) -> int:
    description = "\n".join(
        [f"{inspect.getdoc(MeasureOptions)}\n\n--what adds", *(f"  {name}: {about}" for name, about in WHAT.items())]
    )
    options = parse(MeasureOptions, arguments, prog="nearsight measure", description=description)
    from nearsight.lens.running import remembering_surveys

    _check(options)
    with remembering_surveys():  # of a first look, of trials of batch sizes, of the table and of the page
        return _run(options, arguments)


def _run(options: MeasureOptions, arguments: Sequence[str]) -> int:
    from nearsight.commands.measuring import check_sharding, check_what, in_the_table, measure_shown, prepare, shards_of
    from nearsight.lens import position_gram
    from nearsight.work import check_device, import_ray

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
    # Every job measures only some shards: decoding all images in each would take longer than measuring.
    prepared = prepare(options, options.layers, device, all_decoded=options.shards is None)
    subjects = [one.subject for one in prepared]
    folders = folders_of(options.models, out)
    if "positions" in what:
        # They need no image: a model without them is refused before any is measured.
        for subject in subjects:
            position_gram(subject.model)
    if options.shards is None:
        tables = [measure_shown(one, options.batch_size, in_the_table(what), device) for one in prepared]
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
    # Here, because whatever draws figures takes half a second to load: help, mistakes and jobs of shards do without.
    from nearsight.commands.further import look_further
    from nearsight.commands.measured import Measured, as_json, as_text, write_all

    measured = [
        Measured.of(one.subject, table, [one.layers[name] for name in table.layer_names], folder, device)
        for one, table, folder in zip(prepared, tables, folders, strict=True)
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


def _measure_shards(
    options: MeasureOptions, prepared: Sequence[Prepared], divided: Sequence[Shards], device: torch.device
) -> None:
    """Those that are missing, or of these the one that is asked for."""
    from nearsight.commands.measuring import ShardMeasuring

    measuring = ShardMeasuring(request=options, layers=options.layers, batch_size=options.batch_size, divided=divided)
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
