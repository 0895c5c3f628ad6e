"""What `nearsight model` says of models, and what it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from nearsight.commands.model import ModelOptions
from nearsight.commands.options import folders_of
from nearsight.commands.probe import UNTRAINED, open_frozen
from nearsight.commands.subjects import open_subjects
from nearsight.files import output_folder, write_json, write_text
from nearsight.lens.cost import Cost, forward_cost
from nearsight.lens.running import NoSpatialAttentionError, running, surveyed
from nearsight.lens.survey import Site
from nearsight.lens.widths import Widths, gaussian_widths
from nearsight.locat.gaussian import GaussianHeads
from nearsight.locat.refine import REFINEMENTS

NOTHING = "–"
_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A spatial attention."""

    name: str
    heads: int
    grid: tuple[int, int]
    """Patches, (rows, columns)."""
    patch: tuple[float, float]
    """Height and width of one in pixels."""
    window: int | None
    """Queries of a window, where it has several."""
    prefix: int
    """Tokens that are not patches."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model."""

    text: str
    label: str
    parameters: int
    locat_parameters: int | None
    """What LocAt has added; None without it."""
    refined: bool
    """Whether its patches are refined (PRR)."""
    image_size: tuple[int, int]
    layers: tuple[Layer, ...]
    cost: Cost
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """All of it, for a file."""
        cost = self.cost
        first = self.layers[0] if self.layers else None
        return {
            "model": self.label,
            "parameters": self.parameters,
            "locat_parameters": self.locat_parameters,
            "refines_patches": self.refined,
            "multiply_adds": cost.multiply_adds,
            "multiply_adds_of": {
                "products": cost.products,
                "norms": cost.norms,
                "activations": cost.activations,
            },
            "image_size": list(self.image_size),
            "patch_size": None if first is None else list(first.patch),
            "grid": None if first is None else list(first.grid),
            "patches": None if first is None else first.grid[0] * first.grid[1],
            "prefix_tokens": None if first is None else first.prefix,
            "layers": [vars(layer) for layer in self.layers],
            "weight_bytes": cost.weight_bytes,
            "forward_bytes": cost.forward_bytes,
            "notes": list(self.notes),
        }

    def words(self) -> dict[str, str]:
        """The same for people, line by line."""
        first = self.layers[0] if self.layers else None
        locat = NOTHING
        if self.locat_parameters is not None or self.refined:
            locat = f"{self.locat_parameters or 0:,}" + (", and PRR" if self.refined else "")
        return {
            "parameters": f"{self.parameters:,}",
            "of them LocAt's": locat,
            "multiply-adds": _giga(self.cost.multiply_adds),
            "image": _by(self.image_size),
            "patch": NOTHING if first is None else _by(first.patch),
            "grid": _one_after_another(layer.grid for layer in self.layers),
            "tokens": NOTHING if first is None else f"{first.grid[0] * first.grid[1]:,} patches + {first.prefix}",
            "windows": self._windows(),
            "layers × heads": ", ".join(
                f"{len(list(same))} × {heads}" for heads, same in groupby(layer.heads for layer in self.layers)
            )
            or NOTHING,
            "weights": _megabytes(self.cost.weight_bytes),
            "forward": f"{_megabytes(self.cost.forward_bytes)} per image",
        }

    def _windows(self) -> str:
        sizes = {layer.window for layer in self.layers if layer.window is not None}
        return ", ".join(f"of {size} tokens" for size in sorted(sizes)) or NOTHING


def _by(sides: Sequence[float]) -> str:
    return "×".join(f"{side:g}" for side in sides)


def _one_after_another(grids: Any) -> str:
    return ", ".join(_by(grid) for grid, _ in groupby(grids)) or NOTHING


def _giga(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def describe_all(options: ModelOptions) -> list[Described]:
    """Every model, opened and described one after the other: what is wrong with one is found before the next."""
    opened = open_frozen(
        options.models,
        pretrained=options.pretrained,
        checkpoint=options.checkpoint,
        seed=options.seed,
        device=options.torch_device,
        image_size=options.image_size,
    )
    return [
        describe(text, one.label, one.model, (one.preparation.size[0], one.preparation.size[1]))
        for text, one in zip(options.models, opened, strict=True)
    ]


def describe(text: str, label: str, model: nn.Module, image_size: tuple[int, int]) -> Described:
    """What a model is, for images of (rows, columns)."""
    notes: list[str] = []
    layers, skipped = _layers(model, image_size)
    notes += skipped
    cost = forward_cost(model, image_size)
    if cost.computed:
        notes.append("its forward asks for values, so that it was computed once, and its memory is that of the CPU")
    gaussians = [module for module in model.modules() if isinstance(module, GaussianHeads)]
    return Described(
        text=text,
        label=label,
        parameters=_count(model),
        locat_parameters=sum(map(_count, gaussians)) if gaussians else None,
        refined=any(isinstance(module, REFINEMENTS) for module in model.modules()),
        image_size=image_size,
        layers=tuple(_layer(site) for site in layers),
        cost=cost,
        notes=tuple(notes),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layers(model: nn.Module, image_size: tuple[int, int]) -> tuple[list[Site], list[str]]:
    """Its spatial attentions, and why there are none or others are left out."""
    with running(model) as run:
        try:
            found = surveyed(run.model, torch.zeros(3, *image_size, device=run.device, dtype=run.dtype))
        except NoSpatialAttentionError as error:
            return [], [str(error)]
    refinements = [name for name, module in model.named_modules() if isinstance(module, REFINEMENTS)]  # said elsewhere
    others = {name: reason for name, reason in found.skipped.items() if name not in refinements}
    skipped = [f"{', '.join(names)}: {reason}" for reason, names in _by_reason(others).items()]
    return list(found.layers.values()), skipped


def _by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(reason, []).append(name)
    return names


def _layer(site: Site) -> Layer:
    geometry = site.geometry
    windows, num_queries, _ = geometry.query_places_WN2.shape
    return Layer(
        name=site.name,
        heads=site.num_heads,
        grid=geometry.grid_size,
        patch=geometry.cell_size,
        window=num_queries if windows > 1 else None,
        prefix=int(geometry.query_places_WN2[0, :, 0].isnan().sum()),
    )


def as_json(described: Sequence[Described], files: Sequence[Path]) -> dict[str, Any]:
    return {"models": [one.record() for one in described], "files": [str(path) for path in files]}


def as_text(described: Sequence[Described], files: Sequence[Path]) -> str:
    """A column for each model."""
    lines = [pd.DataFrame({one.text: one.words() for one in described}).to_string()]
    lines += [f"Note: {one.text}: {note}" for one in described for note in one.notes]
    lines += [str(path) for path in files]
    return "\n".join(lines)


def write(options: ModelOptions, described: Sequence[Described], command: str) -> list[Path]:
    """The numbers of all models, and the Gaussians of those that have some."""
    # Here, because whatever draws figures takes half a second to load.
    from nearsight.report.figures.style import save_figure
    from nearsight.report.figures.widths import widths_figure

    assert options.out is not None
    # All that takes long or may fail before the first file.
    found = [_widths(options, one) for one in described]
    out = output_folder(options.out)
    rows = [{name: value for name, value in one.record().items() if _is_simple(value)} for one in described]
    write_text(out / "models.csv", pd.DataFrame(rows).to_csv(index=False))
    write_json(out / "models.json", {"command": command, "models": [one.record() for one in described]})
    files = [out / "models.csv", out / "models.json"]
    for folder, one in zip(folders_of(options.models, out), found, strict=True):
        if one is not None:
            title, widths = one
            write_text(output_folder(folder) / "widths.csv", widths.frame.to_csv(index=False))
            figure = widths_figure(widths.frame, label=title)
            files += [folder / "widths.csv", *save_figure(figure, output_folder(folder / "figures"), "widths")]
    return files


def _is_simple(value: Any) -> bool:
    return not isinstance(value, list | dict)


def _widths(options: ModelOptions, one: Described) -> tuple[str, Widths] | None:
    """A title, and the Gaussians of a model on images; None where there are none, or none that were trained."""
    if one.locat_parameters is None or one.text.startswith(UNTRAINED):
        return None
    pretrained = options.pretrained and not Path(one.text).is_dir()
    (subject,) = open_subjects(replace(options, models=(one.text,), pretrained=pretrained), options.torch_device)
    widths = gaussian_widths(subject.model, subject.images.batches(_BATCH), device=options.torch_device)
    images = "1 image" if widths.num_images == 1 else f"{widths.num_images} images"
    return f"{subject.label} on {images} of {subject.images.name}", widths
