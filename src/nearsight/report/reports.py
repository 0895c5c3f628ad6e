"""The report on some results, whatever gave them: put together first, then written into a folder or on a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.claims import Verdicts
from nearsight.report.marks import Animation, Drawing
from nearsight.report.tables import Table

Draw = Callable[[], Drawing | Animation]
"""An `InputError` says why the runs there are cannot give it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    tables: Sequence[Table]
    figures: Mapping[str, Draw]
    """By the name of their files."""
    verdicts: Verdicts | None
    """None where nothing is claimed or asked."""
    notes: Sequence[str] = ()
    """Under the captions."""

    def write(self, folder: Path) -> tuple[Path, ...]:
        """Write tables/, figures/ and, where claims are judged, verdict.md; the files written.

        Every file is replaced whole, and the same results give the same bytes.
        """
        tables = [*self.tables, *([self.verdicts.table()] if self.verdicts else [])]
        written = [path for table in tables for path in table.write(folder / "tables")]
        written += self._write_figures(folder / "figures")
        if self.verdicts:
            write_text(folder / "verdict.md", self.verdicts.markdown())
            written.append(folder / "verdict.md")
        return tuple(written)

    def _write_figures(self, folder: Path) -> list[Path]:
        """And captions.md, which says what each shows or why it could not be drawn."""
        written: list[Path] = []
        captions = [f"# {self.title}: the figures", ""]
        for name, draw in self.figures.items():
            try:
                drawing = draw()
            except InputError as reason:
                captions.append(f"- **{name}**: not drawn; {reason}.")
                continue
            written += drawing.save(folder, name)
            captions.append(f"- **{name}**: {drawing.caption}")
        write_text(folder / "captions.md", "\n".join([*captions, *(f"- {note}" for note in self.notes)]) + "\n")
        return [*written, folder / "captions.md"]
