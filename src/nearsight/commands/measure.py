"""`nearsight measure MODEL`: the heads of a trained run or of any timm ViT, as a table, figures and a page."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import tyro
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from nearsight.commands.options import Common, parse
from nearsight.data import DATASETS, folder_images, make_shapes
from nearsight.errors import InputError, check_at_least
from nearsight.files import output_folder
from nearsight.lens import HeadTable, measure, patch_grid
from nearsight.models import create_model, load_model
from nearsight.report import ModelHeads, describe, layer_table, read_heads, write_page
from nearsight.report.runs import model_heads, write_figures
from nearsight.train import RunFolder, load_data, measure_on_test, write_heads


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(Common):
    """Measure how far and how selectively each attention head of a model looks.

    Writes heads.csv, three figures and report.html. A run is measured on its own test images unless --images says
    otherwise; any other model on a folder of images, or on the embedded set.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, or the name of a timm model."""
    images: Path | None = None
    """Folder of images to measure on."""
    num_images: int | None = None
    """Images at most; for a run as many as its config says, else 256."""
    batch_size: int = 64
    """Images per forward."""
    pretrained: bool = False
    """Load timm's pretrained weights for a timm model; they are random otherwise."""
    out: Path | None = None
    """Where to write; the run folder itself, or runs/measure-MODEL."""


def main(arguments: Sequence[str]) -> int:
    options = parse(MeasureOptions, arguments, prog="nearsight measure")
    check_at_least("--num-images", options.num_images or 1, 1)
    check_at_least("--batch-size", options.batch_size, 1)
    out, model, measured = _measure_run(options) if Path(options.model).is_dir() else _measure_model(options)
    grid_size = patch_grid(model)
    files = write_figures([measured], out / "figures", grid_size=grid_size)
    page = out / "report.html"
    command = shlex.join(["nearsight", "measure", *arguments])
    write_page(page, title=measured.label, models=[measured], grid_size=grid_size, command=command)
    if options.json:
        heads = measured.heads.to_dict(orient="records")
        print(json.dumps({"heads": heads, "files": [str(path) for path in (out / "heads.csv", *files, page)]}))
        return 0
    print(layer_table([measured])[measured.label].to_string(float_format=lambda value: f"{value:.3f}"))
    print("\n" + "\n".join(describe(measured)))
    print(f"\nTable: {out / 'heads.csv'}\nFigures: {out / 'figures'}\nPage: {page}")
    return 0


def _measure_run(options: MeasureOptions) -> tuple[Path, nn.Module, ModelHeads]:
    folder = RunFolder(Path(options.model))
    config = folder.read_config()
    if options.pretrained:
        raise InputError("--pretrained is for timm models; a run has its own weights")
    device = options.torch_device
    out = output_folder(options.out or folder.path)
    model = load_model(folder.model)
    epoch = folder.read_result()["best_epoch"]
    if options.images is None:
        dataset = load_data(config.data, options.data_dir)
        table = measure_on_test(model, dataset, options.num_images or config.num_measured, device)
    else:
        # The model's own config is its architecture's; what the run was trained on is the data set's.
        spec, patch_embed = DATASETS[config.data.name], cast("Any", model.patch_embed)
        trained_on = {"input_size": (3, *patch_embed.img_size), "mean": spec.mean, "std": spec.std}
        table = _measure_pictures(model, trained_on, options, device)
    write_heads(out / "heads.csv", table.to_frame(), epoch)
    return out, model, model_heads(folder, folder.path.resolve().name, heads=out / "heads.csv")


def _measure_model(options: MeasureOptions) -> tuple[Path, nn.Module, ModelHeads]:
    name = options.model
    if "/" in name or name.startswith("."):
        raise InputError(f"{name} is not a folder, so there is no run to measure there")
    device = options.torch_device
    model = create_model(name, pretrained=options.pretrained)
    out = output_folder(options.out or Path("runs") / f"measure-{name}")
    table = _measure_pictures(model, {}, options, device)
    write_heads(out / "heads.csv", table.to_frame(), 0)
    weights = "pretrained" if options.pretrained else "random weights"
    return out, model, ModelHeads(label=f"{name} ({weights})", heads=read_heads(out / "heads.csv"))


def _measure_pictures(
    model: nn.Module, data_config: dict[str, Any], options: MeasureOptions, device: torch.device
) -> HeadTable:
    """On a folder of images, or on the embedded set, prepared as `data_config` says, else as the model's own does."""
    num_images = options.num_images or 256
    prepare = create_transform(**resolve_data_config(data_config, model=model), is_training=False)
    pictures = _embedded(num_images) if options.images is None else folder_images(options.images, num_images)

    def batches() -> Iterator[Tensor]:
        waiting: list[Tensor] = []
        for picture in pictures:
            waiting.append(prepare(picture))
            if len(waiting) == options.batch_size:
                yield torch.stack(waiting)
                waiting.clear()
        if waiting:
            yield torch.stack(waiting)

    return measure(model, batches(), batch_size=options.batch_size, device=device)


def _embedded(num_images: int) -> Iterator[Image.Image]:
    for pixels in make_shapes(num_images, image_size=64, split="test").images_NCHW:
        yield Image.fromarray(pixels.permute(1, 2, 0).numpy())
