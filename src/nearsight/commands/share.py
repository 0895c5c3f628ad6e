"""`nearsight share RUN TARGET`: a run as others can load it, in a folder or on the Hugging Face Hub."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearsight.commands.options import parse


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """Write a run so that others can load it: weights, config, heads, provenance, its page, and a card of its numbers.

    timm and nearsight both read what is written. On the Hub you need to be logged in (hf auth login).
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or a name of the zoo."""
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|hf-hub:ORG/NAME")]
    """A folder to write, or a repository on the Hub to push to."""
    license: str | None = None
    """Of the weights, as the Hub spells it; by default apache-2.0."""
    private: bool = False
    """Make a new repository private."""
    json: bool = False
    """Print one machine-readable object instead of text."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ShareOptions, arguments, prog="nearsight share")
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.report.sharing import HUB, HubModel, push_to_hub

    if options.target.startswith(HUB):
        repository = options.target.removeprefix(HUB)
        private = True if options.private else None
        url = push_to_hub(options.run, repository, license=options.license, private=private)
        print(json.dumps({"repository": repository, "url": url}) if options.json else f"Pushed: {url}")
        return 0
    folder = Path(options.target)
    HubModel(options.run, license=options.license).save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if options.json:
        print(json.dumps({"folder": str(folder), "files": [str(path) for path in files]}))
        return 0
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"Written: {folder} ({len(files)} files, {size:.1f} MB): {', '.join(path.name for path in files)}")
    print(f"Look at it: nearsight measure local-dir:{folder}")
    return 0
