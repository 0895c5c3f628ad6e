"""`nearsight probe segment MODEL … --data NAME`: a segmentation head on the frozen features of one or more models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from nearsight.commands.masked import OwnMasks
from nearsight.commands.options import parse, short_name, stoppable
from nearsight.commands.probe import ModelsRequest
from nearsight.configuration import field_docs
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.files import check_output_folder
from nearsight.probe.segmentation.config import OWN_FOLDER, REFERENCE_SIZE, SegmentConfig, default_settings

_DESCRIPTION = """Train a segmentation head on the frozen features of models, and test it on whole images.

Writes result.json, per_class.csv, history.csv, the head, and pictures of predictions beside the truth; several models
have a folder each and a table together. Stopped or killed, it continues when the same command is given again.

Settings that are not given are those of S2 for the data set, scaled down for models of images below 224 pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRequest(OwnMasks, ModelsRequest):
    """The options that are not the probe's own settings."""

    data: str = "voc-small"
    """A data set with masks: ade20k, pascal-context, coco-stuff, voc2012, camvid, voc-small; or a folder of your own
    with images, masks and classes.json in it."""
    checkpoint_every: int = 500
    """Iterations between checkpoints; a kill costs those since the last, SIGINT and SIGTERM none."""
    out: Path | None = None
    """Where to write; runs/segment-DATA-MODEL by default."""


def main(arguments: Sequence[str]) -> int:
    options = parse(_options(), arguments, prog="nearsight probe segment", description=_DESCRIPTION)
    options.check("segment")
    out = options.out or options.default_folder("segment", short_name(options.data))
    check_output_folder(out)
    dataset = options.load_masked(options.data, options.data_dir, options.num_train, options.num_test)
    from nearsight.commands.probing_segment import probe_models

    return stoppable(lambda stop: probe_models(options, dataset, out, stop))


def _options() -> type[Any]:
    """The request and every setting of the probe. Where data set and model have a say, None leaves it to them."""
    hints, docs = get_type_hints(SegmentConfig), field_docs(SegmentConfig)
    sets = (*SEGMENTATION_SETS, OWN_FOLDER)
    usual = {name: default_settings(name, image_size=REFERENCE_SIZE, step=1) for name in sets}
    settings: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(SegmentConfig):
        kind, default = hints[field.name], field.default
        own = {name: values[field.name] for name, values in usual.items() if field.name in values}
        if own:
            others = [f"{name}: {value}" for name, value in own.items() if value != default]
            hint = f"({'; '.join([f'default: {default}', *others])})"
            argument, kind, default = tyro.conf.arg(help=docs[field.name], help_behavior_hint=hint), kind | None, None
        else:
            argument = tyro.conf.arg(help=docs[field.name])
        settings.append((field.name, Annotated[kind, argument], dataclasses.field(default=default)))
    return dataclasses.make_dataclass("SegmentOptions", settings, bases=(SegmentRequest,), frozen=True, kw_only=True)
