"""`nearsight data {list,fetch,check}`: which data sets are here, getting one, and whether it is intact."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearsight.commands.options import dispatch, parse
from nearsight.data import check_dataset, data_folder, fetch_dataset, list_datasets
from nearsight.errors import InputError

_USAGE = "usage: nearsight data {list,fetch,check} [NAME] [--data-dir DIR] [--json]"


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Show every data set, and where it is."""

    data_dir: Path | None = None
    """Folder with the data sets; by default NEARSIGHT_DATA, or the user's cache folder."""
    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class NameOptions(ListOptions):
    """Fetch or check one data set."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """The data set, as `nearsight data list` calls it."""


def main(arguments: Sequence[str]) -> int:
    return dispatch("data", arguments, {"list": _list, "fetch": _fetch, "check": _check}, _USAGE)


def _list(arguments: list[str]) -> int:
    options = parse(ListOptions, arguments, prog="nearsight data list")
    folder, listed = data_folder(options.data_dir), list_datasets(options.data_dir)
    if options.json:
        rows = [{**dataclasses.asdict(row), "folder": row.folder and str(row.folder)} for row in listed]
        print(json.dumps({"data_dir": str(folder), "datasets": rows}))
        return 0
    print(f"In {folder}:\n")
    width = max(len(row.name) for row in listed)
    for row in listed:
        place = f" in {row.folder}" if row.folder else ""
        print(f"  {row.name:<{width}}  {row.state:<8}  {row.detail}{place}")
    return 0


def _fetch(arguments: list[str]) -> int:
    options = parse(NameOptions, arguments, prog="nearsight data fetch")
    source = fetch_dataset(options.name, options.data_dir)
    if options.json:
        print(json.dumps({"name": options.name, "folder": str(source.folder), "layout": source.layout}))
    else:
        print(f"{options.name} is in {source.folder} ({source.layout})")
    return 0


def _check(arguments: list[str]) -> int:
    options = parse(NameOptions, arguments, prog="nearsight data check")
    report = check_dataset(options.name, options.data_dir)
    if options.json:
        found = {**dataclasses.asdict(report), "folder": report.folder and str(report.folder), "ok": report.ok}
        print(json.dumps(found))
    else:
        where = f" in {report.folder}" if report.folder else ""
        print(f"{options.name}{where}: {report.layout}")
        for finding in report.findings:
            print(f"  {'ok' if finding.ok else 'WRONG':<5}  {finding.what}: {finding.detail}")
    if not report.ok:
        wrong = "; ".join(f"{finding.what}: {finding.detail}" for finding in report.findings if not finding.ok)
        raise InputError(f"{options.name} is not as it should be: {wrong}")
    return 0
