"""`nearsight train RECIPE`: any field of the recipe's config can be set from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro

from nearsight.augment import AUGMENTATIONS, Augmentation
from nearsight.commands.options import Common, asks_for_usage, listed, parse, print_usage, stoppable
from nearsight.configuration import field_docs
from nearsight.errors import InputError, unknown_name
from nearsight.lazy import torch
from nearsight.models import ModelConfig
from nearsight.train import ASSUMED, PROTOCOLS, Protocol, RunConfig, Stop
from nearsight.train.dino import DinoConfig
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.processes import TIMEOUT
from nearsight.train.recipes import OPTIONS, RUNS

if TYPE_CHECKING:
    from nearsight.train import RunFolder
    from nearsight.train.processes import Processes

_USAGE = """usage: nearsight train RECIPE [--protocol NAME] [OPTIONS]

{recipes}

--protocol is for training with labels; dino-… recipes have one of their own.
nearsight train RECIPE --help shows every setting of a recipe with its default.
A run that was stopped (SIGINT, SIGTERM) or killed continues when the same command is given again.
Several GPUs: torchrun --nproc-per-node N -m nearsight train RECIPE …; the batch is that of all together."""
_CHECKPOINT_HELP = (
    "Epochs between checkpoints; a kill costs those since the last one, SIGINT and SIGTERM cost none. "
    "It changes no number."
)
_TIMEOUT_HELP = "Seconds that one of several processes (torchrun) waits for the others before they count as lost."


def main(arguments: Sequence[str]) -> int:
    if asks_for_usage(arguments):
        about = {name: (recipe.__doc__ or "").splitlines()[0] for name, recipe in {**RUNS, **PRETRAININGS}.items()}
        return print_usage("train", _USAGE.format(recipes=listed(about)), "recipe", arguments)
    name, *rest = arguments
    if name.startswith("-"):
        names = ", ".join([*RUNS, *PRETRAININGS])
        raise InputError(f"the recipe comes first: nearsight train RECIPE [OPTIONS]; recipes: {names}")
    if name in PRETRAININGS:
        return _pretrain(name, rest)
    if name not in RUNS:
        raise unknown_name("recipe", name, [*RUNS, *PRETRAININGS])
    options = _parsed(name, rest)
    config = _config(options)
    out = options.out or Path("runs") / f"{name}-{options.start_from}-{config.identity}"
    return stoppable(lambda stop: _train(config, out, options, stop))


def _parsed(name: str, arguments: Sequence[str]) -> Any:
    recipe = RUNS[name]
    if (model := _read_ahead(arguments, "--model.name")) is not None and ":" in model:
        from nearsight.models.sources import allow_own

        allow_own(model)  # which was typed here
    protocol = _read_ahead(arguments, "--protocol") or next(iter(PROTOCOLS))
    start = _with_network(recipe(protocol), model)
    return parse(
        _options(start, protocol),
        arguments,
        prog=f"nearsight train {name}",
        description=(recipe.__doc__ or "").strip(),
    )


def config_of(arguments: Sequence[str]) -> RunConfig:
    """What `nearsight train` with these arguments trains."""
    name, *rest = arguments
    return _config(_parsed(name, rest))


@dataclass(frozen=True, kw_only=True)
class DinoOptions(Common, DinoConfig):
    """A pretraining run, and where and how it is done."""

    checkpoint_every: int = 1
    """Epochs between checkpoints; a kill costs those since the last one, SIGINT and SIGTERM cost none."""
    timeout: float = TIMEOUT
    """Seconds that one of several processes (torchrun) waits for the others before they count as lost."""
    out: Path | None = None
    """Run folder; runs/… by default."""

    @property
    def config(self) -> DinoConfig:
        return DinoConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(DinoConfig)})


def _pretrain(name: str, arguments: Sequence[str]) -> int:
    recipe = PRETRAININGS[name]
    start = recipe()
    defaults = DinoOptions(**{field.name: getattr(start, field.name) for field in dataclasses.fields(DinoConfig)})
    options = parse(
        DinoOptions,
        arguments,
        prog=f"nearsight train {name}",
        default=defaults,
        description=(recipe.__doc__ or "").strip(),
    )
    out = options.out or Path("runs") / f"{name}-{options.config.identity}"
    from nearsight.commands.dino import pretrain_shown

    return stoppable(lambda stop: pretrain_shown(options, out, stop))


def _train(config: RunConfig, out: Path, options: Any, stop: Stop) -> int:
    from nearsight.commands.progress import TrainingProgress, most_local_head
    from nearsight.train import train_run
    from nearsight.train.processes import Processes, together

    common = Common(device=options.device, data_dir=options.data_dir, json=options.json)
    with together(common.torch_device, timeout=options.timeout) as device:
        processes = Processes.joined()
        if processes.is_first:
            _say_how(config.protocol, processes, out.name)
        with TrainingProgress(out.name) if processes.is_first else contextlib.nullcontext() as progress:
            folder = train_run(
                config,
                out,
                device=device,
                data_dir=common.data_dir,
                listener=progress,
                stop=stop,
                checkpoint_every=options.checkpoint_every,
            )
    if not processes.is_first:
        return 0
    folder.check_there()
    result = folder.read_result()
    page = None if result["min_mad"] is None else _write_page(folder, common, device)
    if common.json:
        print(json.dumps({"folder": str(folder.path), **result}))
    else:
        print(
            f"{folder.path}: test accuracy {result['test_acc']:.2%} (best epoch {result['best_epoch']} of "
            f"{result['epochs']}), {most_local_head(result)}" + (f"; page: {page}" if page else "")
        )
    return 0


def _write_page(folder: RunFolder, common: Common, device: torch.device) -> Path:
    from nearsight.commands.exploring import explorer_of_runs
    from nearsight.report.page.folders import write_folder_page

    runs = {folder.path.resolve().name: folder.path}
    return write_folder_page(folder.path, explorer=explorer_of_runs(runs, data_dir=common.data_dir, device=device))


def _say_how(protocol: Protocol, processes: Processes, label: str) -> None:
    """Print what is not the default: how a batch is shared, and the scaled learning rate."""
    batch = f"batches of {protocol.batch_size} images"
    if processes.num > 1:
        batch += f" over {processes.num} processes"
    elif protocol.lr_scaling == "none":
        return
    print(f"{label}: {batch}, peak learning rate {protocol.peak_lr:g}", file=sys.stderr, flush=True)


def _read_ahead(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option that decides the defaults of others, if it is given."""
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}=")
    return None


def _with_network(start: RunConfig, name: str | None) -> RunConfig:
    """The run to start from: where another kind of network is asked for, without the recipe's settings of its own."""
    if name is None or name == start.model.name:
        return start
    asked = ModelConfig(name=name)
    return start if asked.is_like(start.model) else dataclasses.replace(start, model=asked)


def _options(start: RunConfig, protocol: str) -> type[Any]:
    """The fields of a run as command-line options, with the recipe's values as defaults.

    Augmentations are a list in the config and named options here: one that the protocol lacks has probability 0.
    """
    protocol_fields = _fields_of(start.protocol, without=("augment",))
    for name, kind in AUGMENTATIONS.items():
        held = start.protocol.augmentation(name) or dataclasses.replace(kind(), p=0.0)
        # With all help: tyro would look for it in the source of each class, which takes as long as all the rest.
        described = dataclasses.make_dataclass(
            kind.__name__, _fields_of(held), bases=(kind,), frozen=True, kw_only=True
        )
        about = {"help": inspect.getdoc(kind) or ""}
        protocol_fields.append((name, described, dataclasses.field(default=described(), metadata=about)))
    protocol_options = dataclasses.make_dataclass("ProtocolOptions", protocol_fields, frozen=True, kw_only=True)
    names: Any = Literal[tuple(PROTOCOLS)]
    chosen: Any = Annotated[
        names,
        tyro.conf.arg(name="protocol", help="The protocol to start from; --protocol.… then changes it."),
    ]
    fields = [
        ("start_from", chosen, dataclasses.field(default=protocol)),
        *_fields_of(start, without=("protocol",)),
        ("protocol", protocol_options, dataclasses.field(default=protocol_options())),
        *_fields_of(Common()),
        (
            "checkpoint_every",
            Annotated[int, tyro.conf.arg(help=_CHECKPOINT_HELP)],
            dataclasses.field(default=1),
        ),
        (
            "timeout",
            Annotated[float, tyro.conf.arg(help=_TIMEOUT_HELP)],
            dataclasses.field(default=TIMEOUT),
        ),
        (
            "out",
            Annotated[Path | None, tyro.conf.arg(help="Run folder; runs/… by default.")],
            dataclasses.field(default=None),
        ),
    ]
    return dataclasses.make_dataclass("TrainOptions", fields, frozen=True, kw_only=True)


def _fields_of(config: Any, without: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """A config's fields as (name, type with its help text, default), for `make_dataclass`."""
    hints, docs = get_type_hints(type(config)), field_docs(type(config))
    described = []
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        text = docs.get(field.name, "") + (" Assumed: not reported by the paper." if field.name in ASSUMED else "")
        named = OPTIONS.get(field.name) if isinstance(config, RunConfig) else None
        kind = Annotated[hints[field.name], tyro.conf.arg(help=text, name=named)] if text else hints[field.name]
        described.append((field.name, kind, dataclasses.field(default=getattr(config, field.name))))
    return described


def _config(options: Any) -> RunConfig:
    names = {field.name for field in dataclasses.fields(RunConfig)} - {"protocol"}
    return RunConfig(**{name: getattr(options, name) for name in names}, protocol=_protocol(options.protocol))


def _protocol(options: Any) -> Protocol:
    scalars = {field.name for field in dataclasses.fields(Protocol)} - {"augment"}
    protocol = Protocol(**{name: getattr(options, name) for name in scalars}, augment=())
    for name, kind in AUGMENTATIONS.items():
        augmentation = kind(**vars(getattr(options, name)))
        if augmentation.p > 0:
            protocol = protocol.with_(augmentation)
        else:
            _check_unchanged(augmentation, getattr(type(options), name))
    return protocol


def _check_unchanged(off: Augmentation, default: Augmentation) -> None:
    """Refuse settings of an augmentation that is off: who gives them believes that it is applied."""
    for field in dataclasses.fields(off):
        if field.name != "p" and getattr(off, field.name) != getattr(default, field.name):
            raise InputError(
                f"{off.name}.{field.name} is {getattr(off, field.name)}, but {off.name} is never applied; say how "
                f"often with --protocol.{off.name.replace('_', '-')}.p"
            )
