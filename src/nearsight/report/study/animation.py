"""A figure that moves: frames drawn one after the other, as a GIF. The same data give the same bytes."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from nearsight.files import replacing
from nearsight.report.figures.style import house_style

DPI = 100
# In milliseconds; the last frame stays, to be read before the film begins again.
FRAME, LAST_FRAME = 160, 3000
NUM_COLOURS = 64


@dataclass(frozen=True, kw_only=True)
class Animation:
    frames: Iterable[Figure]
    """All of one size. Each is drawn before the next is asked for, so it may be the same figure, changed."""
    caption: str


def save_animation(animation: Animation, folder: Path, name: str) -> Path:
    """Write `name`.gif, which repeats for ever."""
    path = folder / f"{name}.gif"
    images = [_image(figure) for figure in animation.frames]
    # One palette for all frames: the last one has every colour, and colours do not flicker.
    palette = images[-1].quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    reduced = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    times = [FRAME] * (len(reduced) - 1) + [LAST_FRAME]
    with replacing(path) as temporary:
        reduced[0].save(
            temporary, format="GIF", save_all=True, append_images=reduced[1:], duration=times, loop=0, optimize=False
        )
    return path


def _image(figure: Figure) -> Image.Image:
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=DPI)
    return Image.open(buffer).convert("RGB")
