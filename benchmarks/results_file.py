"""What every result file says besides its numbers: machine, versions, date and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tlora_fx

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "peft")
WIDTH = 150


def described(name: str, device: str) -> dict[str, Any]:
    """The head of a result file.

    name     of the benchmark, `benchmarks/<name>.py`
    device   what it ran on, "cuda" or "cpu"
    """
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *_arguments()]),
        "hardware": hardware() | gpu(device),
        "versions": versions(),
    }


def _arguments() -> list[str]:
    """Those of the command line, without where the result goes: that is this machine's affair."""
    given, kept = iter(sys.argv[1:]), []
    for word in given:
        if word in ("-o", "--out", "--output"):
            next(given, None)
        elif not word.startswith(("--out=", "--output=")):
            kept.append(word)
    return kept


def hardware() -> dict[str, Any]:
    """The machine, as far as it matters for a benchmark."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
    }


def gpu(device: str) -> dict[str, Any]:
    """The GPU as torch sees it; nothing where the benchmark ran on a CPU."""
    if device != "cuda":
        return {}
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu_memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "compute_capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of what it is measured against."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "tlora-fx": tlora_fx.__version__,
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a result file; a benchmark that is stopped half way leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(found, indent=2) + "\n")
    whole.replace(path)


def console() -> Console:
    """A terminal as wide as it is, or wide enough for the tables."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def bare_table(*heads: str, title: str | None = None, texts: int = 1) -> Table:
    """A table without lines, because logs are cut by characters.

    texts   columns of text, the first ones; the others hold numbers, which stand to the right
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < texts else "right")
    return table
