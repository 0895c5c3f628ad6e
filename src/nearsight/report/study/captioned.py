"""A folder of figures, and captions.md, which says what each shows or why it could not be drawn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text

WriteFigure = Callable[[Path, str], tuple[Sequence[Path], str]]
"""Writes a figure of this name into a folder: its files, and its caption."""


def write_captioned(folder: Path, title: str, figures: Mapping[str, WriteFigure], notes: Iterable[str]) -> list[Path]:
    """Write the figures by their names, and their captions; the files written."""
    written: list[Path] = []
    captions = [f"# {title}: the figures", ""]
    for name, write in figures.items():
        try:
            paths, caption = write(folder, name)
        except InputError as reason:
            captions.append(f"- **{name}**: not drawn; {reason}.")
            continue
        written += paths
        captions.append(f"- **{name}**: {caption}")
    write_text(folder / "captions.md", "\n".join([*captions, *(f"- {note}" for note in notes)]) + "\n")
    return [*written, folder / "captions.md"]
