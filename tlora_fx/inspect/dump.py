"""Write a Shared Super-Model into a folder: code, listing, data, report and kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path

from tlora_fx.durable import replace_file
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.code_view import render_program
from tlora_fx.inspect.listing import make_listing
from tlora_fx.inspect.node_entries import make_program
from tlora_fx.inspect.program import FILE as PROGRAM
from tlora_fx.inspect.program import FOLDER, Stage, named
from tlora_fx.inspect.report import render_report
from tlora_fx.inspect.schema import FILE, Listing
from tlora_fx.inspect.site_kernels import kernel_files
from tlora_fx.inspect.text import render_text
from tlora_fx.model.supermodel import SuperModel

COMPILED = "compiled"
KERNELS = "kernels"
_STAGE = re.compile(r"\d{2,}-[a-z0-9-]+\.(json|txt)")
_KERNEL = re.compile(r"[a-z_]+_\d+x\d+_\w+_sm\d+_[0-9a-f]{8}\.py")


def dump(model: SuperModel, folder: Path | str, stages: Sequence[Stage] = ()) -> Listing:
    """Write `ssm.py`, `ssm.txt`, `ssm.json`, `program.json`, `report.txt` and `kernels/`.

    `kernels/` holds the generated kernels of the model's sites, to be read: what runs is made again
    where it runs. Each file is replaced at once, what else lies in the folder stays. The model
    needs no weights.

    stages    what every pass left (see `Recorder`): `passes/NN-NAME.json`, and `.txt` to read;
              those of an earlier dump go, with or without new ones
    returns   what `ssm.txt` and `report.txt` were made of
    raises    DumpNotWritable
    """
    folder = Path(folder)
    listing = make_listing(model)
    state = stages[-1].program.state if stages else COMPILED
    program = make_program(model.group, state, listing.base.title)
    files = {
        "ssm.py": model.source,
        "ssm.txt": render_text(listing),
        "report.txt": render_report(listing),
        FILE: listing.to_json(),
        PROGRAM: program.to_json(),
        **_stage_files(stages, listing.base.title),
        **{f"{KERNELS}/{name}": text for name, text in kernel_files(model.group).items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder / FOLDER, _STAGE)
        for inner in {str(Path(name).parent) for name in files}:
            (folder / inner).mkdir(exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
        _clear(folder / KERNELS, _KERNEL, {Path(name).name for name in files})
    except OSError as error:
        raise DumpNotWritable(
            "the folder for the compiled model cannot be written",
            folder=folder,
            found=error,
            help="choose another folder with -o, or make room on the disk",
        ) from error
    return listing


def _stage_files(stages: Sequence[Stage], base: str) -> dict[str, str]:
    """The files of `passes/` by name: the data of every stage, and its code to read."""
    files = {}
    for left in stages:
        stage = named(left, base)
        name = f"{FOLDER}/{stage.place:02d}-{stage.program.state}"
        files[f"{name}.json"] = stage.to_json()
        files[f"{name}.txt"] = render_program(stage.program)
    return files


def _clear(folder: Path, ours: re.Pattern[str], kept: Set[str] = frozenset()) -> None:
    """Remove what an earlier dump wrote under such names; what else lies there stays."""
    for file in folder.glob("*"):
        if ours.fullmatch(file.name) and file.name not in kept:
            file.unlink()
