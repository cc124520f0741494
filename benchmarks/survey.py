"""Train every causal architecture of the installed transformers as PEFT alone does.

    python -m benchmarks.survey                                      # result file and page
    python -m benchmarks.survey --only gemma3_text mpt               # these again
    python -m benchmarks.survey --out FILE                           # another file, and no page

Each base has four layers, random float64 weights and computes in float64 throughout. Two jobs of
unlike ranks and lengths adapt all linears for three steps, packed and padded, and by plain PEFT
and torch.optim. A process for each architecture; what the file already holds of the installed
transformers and PEFT does not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import resource
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging

from benchmarks.results_file import RESULTS, described, write
from benchmarks.survey_bases import (
    FIRST_ID,
    VOCABULARY,
    architectures,
    factory_of,
    make_base,
    small_config,
    widen,
)
from tests.silence import oracle
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import OwnLossDiffers

CPU_SECONDS, WALL_SECONDS = 300, 1200
IDS = range(FIRST_ID, VOCABULARY)
NO_PEFT = "no PEFT"
USED = ("transformers", "peft")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARKS = ("<!-- survey -->", "<!-- end of survey -->")
Found = dict[str, Any]


def main() -> None:
    """Survey what is missing, write after each, and the page's table in the end."""
    given = _arguments()
    result: Found = described("survey", "cpu")
    out = Path(given.out) if given.out else _file(result)
    _run(out, result, given.only)
    page = given.page or (None if given.out else PAGE)
    if page and result["bases"].keys() >= {*architectures()}:
        text = Path(page).read_text(encoding="utf-8")
        Path(page).write_text(with_table(text, result), encoding="utf-8")


def _file(result: Found) -> Path:
    """The newest file, if it is of the installed versions, or one of today."""
    newest = max(RESULTS.glob("survey-*.json"), default=None)
    if newest and held_of(newest, result):
        return newest
    return RESULTS / f"survey-{result['date']}.json"


def held_of(file: Path, result: Found) -> Found:
    """What a file holds of the installed versions."""
    earlier: Found = json.loads(file.read_text()) if file.exists() else {}
    same = earlier and all(earlier["versions"][name] == result["versions"][name] for name in USED)
    return dict(earlier["bases"]) if same else {}


def _run(out: Path, result: Found, only: list[str] | None) -> None:
    result["bases"] = held = held_of(out, result)
    for name in only or ():
        held.pop(name, None)
    names = only or architectures()
    for name in (name for name in names if name not in held):
        held[name] = in_a_process(name, "auto")
        _keep(out, result, name)
    for name in (n for n in names if held[n].get("form") == "packed" and "padded" not in held[n]):
        held[name]["padded"] = in_a_process(name, "batch")
        _keep(out, result, name)
    result["bases"] = dict(sorted(held.items()))


def _keep(out: Path, result: Found, name: str) -> None:
    write(out, result | {"bases": dict(sorted(result["bases"].items()))})
    sys.stdout.write(f"{name:<28} {json.dumps(result['bases'][name])}\n")
    sys.stdout.flush()


def with_table(page: str, result: Found) -> str:
    """A page with the tables of a result between its marks."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return "\n".join([before + MARKS[0], "", *_lines(result), "", MARKS[1] + after])


def _lines(result: Found) -> list[str]:
    bases: dict[str, Found] = result["bases"]
    count = Counter(found["verdict"] for found in bases.values())
    count += Counter(part["verdict"] for found in bases.values() if (part := found.get("padded")))
    trains = sum(_of(found) == "trains" for found in bases.values())
    adapted = [found for found in bases.values() if found["verdict"] != NO_PEFT]
    slow = sorted(bases, key=lambda name: -bases[name].get("seconds", 0))[:3]
    used = (f"{name} {result['versions'][name]}" for name in USED)
    return [
        f"| {', '.join(used)} | |",
        "| --- | --- |",
        f"| causal architectures | {len(bases)} |",
        f"| that PEFT adapts | {len(adapted)} |",
        f"| of these, train as by PEFT alone | {trains}, {trains / max(len(adapted), 1):.0%} |",
        f"| are refused in one sentence | {sum('refused' in _of(found) for found in adapted)} |",
        f"| train otherwise than alone, without a word | {count['wrong']} |",
        f"| end in an error of another library | {count['crashed']} |",
        "| slowest answers, CPU seconds | "
        + ", ".join(f"{name} {bases[name].get('seconds', 0):.0f}" for name in slow) + " |",
        "",
        "| architecture | verdict | packed | padded | CPU s | why |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(name, found) for name, found in bases.items()),
    ]  # fmt: skip


def _of(found: Found) -> str:
    """A verdict in the page's words."""
    parts = [found, *([found["padded"]] if "padded" in found else [])]
    worst = next((v for v in ("wrong", "crashed") if any(p["verdict"] == v for p in parts)), "")
    if found["verdict"] == "refused":
        return f"refused, {found['code']}"
    return {"equal": "trains", NO_PEFT: "not by PEFT"}.get(worst or found["verdict"], "**fails**")


def _row(name: str, found: Found) -> str:
    packed = found if found.get("form") == "packed" else {}
    padded = found.get("padded", {} if packed else found)
    worst = [
        f"{part['difference']:.0e}" if "difference" in part else "" for part in (packed, padded)
    ]
    words = (found.get("words") or padded.get("words", "")).partition(". ")[0]
    cells = [name, _of(found), *worst, f"{found.get('seconds', '')}", words.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def in_a_process(name: str, form: oracle.Form) -> Found:
    """What `surveyed` says; how the process ended where it says nothing."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, form, writer))
    process.start()
    writer.close()
    try:
        if reader.poll(WALL_SECONDS):
            found: Found = reader.recv()
            return found
        words = f"no answer within {WALL_SECONDS} s"
    except EOFError:
        process.join()
        words = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return {"verdict": "crashed", "words": words}


def _child(name: str, form: oracle.Form, writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with TemporaryDirectory() as folder:
        os.environ["TLORA_FX_CACHE"] = f"{folder}/cache"
        writer.send(surveyed(name, form, Path(folder)))


def surveyed(name: str, form: oracle.Form, folder: Path) -> Found:
    """The verdict on one architecture.

    returns   verdict: equal, refused, wrong, crashed (in words of another library) or "no PEFT";
              form of the rows; difference, the largest relative one of losses and updates; seconds
              of CPU until the jobs are compiled or refused; code and words of an error
    """
    warnings.simplefilter("ignore")
    try:
        make_base(small_config(name)).save_pretrained(folder / "base")
        widen()
        targets, alone = _alone(folder / "base")
        if not all(math.isfinite(loss) for course in alone.values() for loss in course.losses):
            raise ValueError("its loss is not finite")
    except Exception as error:  # noqa: BLE001  (whatever keeps PEFT from it)
        return {"verdict": NO_PEFT, "words": _line(error)}
    return _judged(folder / "base", form, targets, alone)


def _alone(folder: Path) -> tuple[Any, dict[str, oracle.Course]]:
    """The targets that PEFT adapts, and what it makes of each job.

    All linears; else those that PEFT knows: no out_proj of a Mamba, no class of a model's own.
    """
    model = load(folder)
    targets, linears = _targets(model)
    known = [n for n in linears if type(model.get_submodule(n)) is nn.Linear]
    attempts = (targets, [name for name in known if not name.endswith("out_proj")])
    for attempt in attempts:
        try:
            return attempt, {
                job: oracle.train_alone(load(folder), job, attempt, IDS) for job in oracle.RANKS
            }
        except (AttributeError, RuntimeError, TypeError, ValueError):
            if attempt is attempts[-1]:
                raise
    raise AssertionError


def _judged(
    folder: Path, form: oracle.Form, targets: Any, alone: dict[str, oracle.Course], **fields: Any
) -> Found:
    spec = BaseSpec(model=str(folder), dtype="float64", attention=form)
    began = time.process_time()
    try:
        fused, rows, compiled = oracle.train_fused(oracle.jobs_on(spec, targets, **fields), IDS)
    except OwnLossDiffers as error:
        found = _judged(folder, form, targets, alone, loss="cross_entropy")
        otherwise = f"with loss: cross_entropy; otherwise {error.code}, {_line(error)}"
        return {"words": otherwise, **found}
    except Exception as error:  # noqa: BLE001  (whatever is no error of ours is looked for)
        seconds = time.process_time() - began
        verdict = oracle.refusal(error, form)
        code = getattr(error, "code", None)
        said = {"code": code, "words": _line(error)} if code else {"words": _line(error)}
        return {"verdict": verdict.outcome, "seconds": round(seconds, 1), **said}
    verdict = oracle.compared(fused, alone, rows)
    return {
        "verdict": verdict.outcome, "form": rows, "difference": float(f"{verdict.difference:.1e}"),
        "seconds": round(compiled - began, 1),
    }  # fmt: skip


def load(folder: Path) -> nn.Module:
    """A saved base by transformers alone."""
    config = AutoConfig.from_pretrained(folder)
    model: nn.Module = factory_of(config).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.double()


def _targets(model: Any) -> tuple[Any, list[str]]:
    """All linears but the head that text runs through, by name, and how a job says that."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    ran: list[str] = []
    for name, module in linears.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        model(torch.tensor([list(IDS[:9])]))
    head = model.get_output_embeddings()
    body = [name for name, module in linears.items() if module is not head]
    used = sorted(set(ran) & set(body))
    return "all-linear" if len(used) == len(body) else used, used


def _line(error: Exception) -> str:
    what = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
    return re.sub(r"\s+", " ", re.sub(r"/\S*/(?=[\w.]+)", "", what)).strip()[:200]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="the result file; in benchmarks/results by default")
    parser.add_argument("--only", nargs="*", help="types of models to run again, instead of all")
    parser.add_argument("--page", help="page that takes the table; docs/models.md without --out")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    main()
