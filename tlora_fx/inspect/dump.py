"""Write a Shared Super-Model into a folder: code, listing, data and report."""

from __future__ import annotations

from pathlib import Path

from tlora_fx.durable import replace_file
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.listing import make_listing
from tlora_fx.inspect.report import render_report
from tlora_fx.inspect.schema import FILE, Listing
from tlora_fx.inspect.text import render_text
from tlora_fx.supermodel import SuperModel


def dump(model: SuperModel, folder: Path | str) -> Listing:
    """Write `ssm.py`, `ssm.txt`, `ssm.json` and `report.txt`; returns what they were made of.

    Each file is replaced at once, what else lies in the folder stays. The model needs no weights.

    raises    DumpNotWritable
    """
    folder = Path(folder)
    listing = make_listing(model)
    files = {
        "ssm.py": model.source,
        "ssm.txt": render_text(listing),
        "report.txt": render_report(listing),
        FILE: listing.to_json(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
    except OSError as error:
        raise DumpNotWritable(
            "the folder for the compiled model cannot be written",
            folder=folder,
            found=error,
            help="choose another folder with -o, or make room on the disk",
        ) from error
    return listing
