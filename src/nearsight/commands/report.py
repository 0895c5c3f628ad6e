"""`nearsight report DIR`: one page of a run, a study or a measured model, or of several side by side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from nearsight.commands.options import Common, parse, short_name
from nearsight.errors import InputError
from nearsight.files import check_output_folder, write_text

if TYPE_CHECKING:
    from nearsight.report.explorer import Explorer
    from nearsight.report.page.folders import Contents


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Common):
    """Write one self-contained page that opens in any browser, without a network.

    DIR is a run, a study (also one of which only the tables are kept), what nearsight measure leaves, or a folder of
    such runs or models. The page is made again from the files there; nothing is trained.
    """

    folder: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]", help_behavior_hint="")
    ] = ()
    """The folder to report on."""
    compare: tuple[Path, ...] = ()
    """Instead of one folder, several runs or measured models to show side by side."""
    out: Path | None = None
    """Folder for the page; by default DIR itself, and for a comparison runs/compare-A-and-B."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ReportOptions, arguments, prog="nearsight report")
    _check(options)
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.papers import declare_all
    from nearsight.report.page.document import PAGE
    from nearsight.report.page.folders import read_folder, read_folders

    declare_all()
    out = options.out or _default_folder(options)
    check_output_folder(out)
    contents = read_folders(options.compare) if options.compare else read_folder(options.folder[0])
    html = contents.html(_explorer(contents, options))
    path = out / PAGE
    write_text(path, html)
    if options.json:
        described = {"page": str(path), "kind": contents.kind, "title": contents.title, "bytes": len(html.encode())}
        print(json.dumps(described, ensure_ascii=False))
    else:
        print(f"Page: {path}")
    return 0


def _check(options: ReportOptions) -> None:
    if options.compare and options.folder:
        raise InputError("a folder and --compare do not go together; name all folders after --compare")
    if len(options.compare) == 1:
        raise InputError("--compare needs two folders or more; for one write nearsight report DIR")
    places = [folder.resolve() for folder in options.compare]
    for folder, place in zip(options.compare, places, strict=True):
        if places.count(place) > 1:
            raise InputError(f"--compare names {folder} more than once; name each folder once")
    if len(options.folder) > 1:
        raise InputError("nearsight report takes one folder; for several side by side write --compare A B …")
    if not options.compare and not options.folder:
        raise InputError("no folder is named; write nearsight report DIR, or --compare A B …")


def _default_folder(options: ReportOptions) -> Path:
    if not options.compare:
        return options.folder[0]
    first, *others = (short_name(str(folder)) for folder in options.compare)
    end = f"-and-{others[0]}" if len(others) == 1 else f"-and-{len(others)}-more"
    return Path("runs") / f"compare-{first}{end}"


def _explorer(contents: "Contents", options: ReportOptions) -> "Explorer | None":
    """Where the heads look, if the weights and images for it are here, or were looked at when they were measured."""
    from nearsight.commands.exploring import explorer_of_runs, explorer_of_study
    from nearsight.commands.measured import EXPLORER
    from nearsight.report.explorer import Explorer

    if contents.study is not None:
        return explorer_of_study(
            options.folder[0], contents.study, data_dir=options.data_dir, device=options.torch_device
        )
    if contents.models and len(contents.runs) == len(contents.models):
        return explorer_of_runs(contents.runs, data_dir=options.data_dir, device=options.torch_device)
    kept = [folder / EXPLORER for folder in options.folder if (folder / EXPLORER).exists()]
    return Explorer.read(kept[0]) if kept else None
