"""Job files made of config files of other tools: Axolotl, LLaMA-Factory and TRL.

A file is read key by key (`draft`). Arguments of transformers' Trainer, by which all three tools
train, go the way of `Job.from_trl` (`trainer`). What a tool has beside them stands in its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tlora_fx.config.imports import axolotl, llama_factory, trl
from tlora_fx.config.imports.draft import Draft, Imported, LeftOut, refused
from tlora_fx.config.job_file import read_yaml
from tlora_fx.errors import ImportRefused, JobFileError

__all__ = ["TOOLS", "Imported", "LeftOut", "import_config"]

#: By the name of a tool, what reads its config files, and keys that are typical of them.
TOOLS: Mapping[str, tuple[str, Callable[[Draft], None], frozenset[str]]] = {
    "axolotl": ("Axolotl", axolotl.carry, axolotl.TYPICAL),
    "llama-factory": ("LLaMA-Factory", llama_factory.carry, llama_factory.TYPICAL),
    "trl": ("TRL", trl.carry, trl.TYPICAL),
}


def import_config(
    source: str | Path, target: str | Path = "jobs.yaml", tool: str | None = None
) -> Imported:
    """Make a job file of another tool's config file; writes nothing.

    source  the config file, in YAML
    target  where the job file will stand: its relative paths start there
    tool    a key of `TOOLS`; None: recognised by the keys of the file
    raises  JobFileMissingError, JobFileSyntaxError, ImportRefused with all mistakes
    """
    source, target = Path(source), Path(target)
    try:
        content = read_yaml(source).value
    except JobFileError as error:
        what = error.what.replace("the job file", "the config file")
        raise type(error)(what, help=error.help, **error.facts) from None
    if not isinstance(content, dict):
        raise refused(source, {"the file": "it is no mapping (key: value)"})
    title, carry, _ = TOOLS[tool or _recognised(source, content)]
    draft = Draft(title, source, target, dict(content))
    carry(draft)
    return draft.finish()


def _recognised(source: Path, content: Mapping[str, object]) -> str:
    """The tool whose keys a file has; raises ImportRefused where it has none, or those of two."""
    counts = {name: len(typical & content.keys()) for name, (_, _, typical) in TOOLS.items()}
    best = max(counts.values())
    likely = [name for name, count in counts.items() if count == best]
    if best and len(likely) == 1:
        return likely[0]
    help = f"name the tool: --from {', '.join(TOOLS)}"
    if "jobs" in content and "base" in content:
        help = "it is a job file already: tlora-fx train"
    what = "no config file of " + " or ".join(title for title, _, _ in TOOLS.values())
    if best:
        what = "the keys are those of " + " and of ".join(TOOLS[name][0] for name in likely)
    raise ImportRefused(what, file=source, help=help)
