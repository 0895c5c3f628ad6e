"""`nearsight maps MODEL --out FILE`: where every query of every head looks, as a file of attention maps."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearsight.commands.options import Request, parse
from nearsight.errors import InputError, check_at_least
from nearsight.files import check_output_folder
from nearsight.lazy import pd, torch

if TYPE_CHECKING:
    from nearsight.lens import LayerMaps

BATCH = 16


@dataclass(frozen=True, kw_only=True)
class MapsOptions(Request):
    """Write the attention maps of a model as one file of safetensors.

    Maps are large: 22 MB per image of a ViT-B/16 at 224 pixels. What they will need is said before they are made, and
    what does not fit on the disk is refused. In Python, nearsight.open_maps(FILE) opens them.
    """

    out: Path
    """The file to write, such as maps.safetensors; attention maps that are there are replaced, other files are not."""
    layers: tuple[str, ...] = ()
    """Layers, by number (from 0, as in heads.csv; from the end if negative) or by name; all by default."""
    heads: tuple[str, ...] = ()
    """Heads of each of these layers, by number (from 0); all by default."""
    num_images: int | None = 8
    """Images at most."""
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32"
    """Of the maps; float16 and bfloat16 take half the room."""


def main(arguments: Sequence[str]) -> int:
    options = parse(MapsOptions, arguments, prog="nearsight maps")
    if len(options.models) != 1:
        raise InputError(
            f"maps are written of one model, but {len(options.models)} are named; see nearsight maps --help"
        )
    check_at_least("--num-images", 1 if options.num_images is None else options.num_images, 1)
    heads = _numbers(options.heads)
    _check_out(options.out)
    # Here, because help and mistakes do without.
    from nearsight.commands.measuring import prepare
    from nearsight.commands.pictures import within_memory
    from nearsight.lens import attention_maps
    from nearsight.lens.maps import empty_maps
    from nearsight.lens.mapsfile import size_of_maps
    from nearsight.lens.running import remembering_surveys

    device, dtype = options.torch_device, getattr(torch, options.dtype)
    with remembering_surveys():
        (one,) = prepare(options, options.layers, device)
        images = torch.cat(list(one.subject.images.batches(BATCH)))
        model, chosen = one.subject.model, list(one.layers) if options.layers else None
        empty = empty_maps(model, images[:1], layers=chosen, heads=heads, dtype=dtype, device=device)
        size = size_of_maps(empty, len(images))
        _check_room(options.out, size)
        on = "1 image" if len(images) == 1 else f"{len(images)} images"
        print(f"{one.subject.label}: the maps of {on} need {_in_words(size)}", file=sys.stderr)
        within_memory(
            lambda batch_size: attention_maps(
                model,
                images,
                layers=chosen,
                heads=heads,
                dtype=dtype,
                out=options.out,
                batch_size=batch_size,
                device=device,
                progress=sys.stderr.isatty(),
            ),
            min(BATCH, len(images)),
            may_shrink=True,
        )
    numbers = one.layers if chosen else {name: number for number, name in enumerate(one.first_look.layer_names)}
    layers = [_described(numbers.get(layer.name), layer) for layer in empty]
    if options.json:
        found = {"model": one.subject.label, "file": str(options.out), "bytes": size, "num_images": len(images)}
        print(json.dumps({**found, "dtype": options.dtype, "layers": layers, "notes": list(one.subject.notes)}))
        return 0
    shown = pd.DataFrame(layers).map(lambda value: "×".join(map(str, value)) if isinstance(value, list) else value)
    shown = shown.assign(heads=[len(layer["heads"]) for layer in layers])
    print(shown.drop(columns="others").to_string(index=False))
    print(*(f"Note: {note}" for note in one.subject.notes), sep="\n", end="\n" if one.subject.notes else "")
    _, num_heads, num_queries, num_keys = empty[0].weights_BHQK.shape
    print(
        f"\nMaps: {options.out} ({_in_words(size)})\n"
        f"In Python: maps = nearsight.open_maps({str(options.out)!r})\n"
        f"maps[0].weights_BHQK is [{len(images)} images, {num_heads} heads, {num_queries} queries, {num_keys} patches] "
        f"of {empty[0].name}."
    )
    return 0


def _numbers(heads: Sequence[str]) -> list[int] | None:
    names = [name for text in heads for name in text.replace(",", " ").split()]
    try:
        return [int(name) for name in names] or None
    except ValueError:
        raise InputError(f"--heads {' '.join(names)}: heads are named by their numbers, from 0") from None


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of a file, such as {out / 'maps.safetensors'}")
    check_output_folder(out.parent)
    if out.exists():
        from nearsight.lens import open_maps

        try:
            open_maps(out)
        except InputError as error:  # a model's weights have the same ending
            raise InputError(f"{out} is there and is no file of attention maps; choose another --out") from error


def _check_room(out: Path, size: int) -> None:
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if size > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"the maps need {_in_words(size)}, but {folder} has {_in_words(free)} left; choose fewer --num-images, "
            "--layers or --heads, --dtype float16, or another --out"
        )


def _described(number: int | None, layer: LayerMaps) -> dict[str, Any]:
    return {
        "layer": number,
        "name": layer.name,
        "heads": list(layer.heads),
        "queries": list(layer.query_grid),
        "keys": list(layer.key_grid),
        "others": list(layer.others),
    }


def _in_words(size: int) -> str:
    for unit, number in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= number:
            return f"{size / number:.1f} {unit}"
    return f"{size} bytes"
