"""One base with open slots: what models of clients train on, and versions are sampled from.

Its layers are compiled beside cycles. The log has after which cycle they took over: by that, what
runs again after a kill runs as it ran, as compiled code or as before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import library_products, why_launched
from tlora_fx.errors import CommandRefused, GenerationError
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.backbone import Backbone, load_backbone, longest_sequence
from tlora_fx.runtime.group_step import GroupStep, StepOptions
from tlora_fx.runtime.rounds.compiled_layers import CompiledLayers, LoggedNotes
from tlora_fx.runtime.sampling.sampler import Sampler
from tlora_fx.training.log import LAYERS, ONCE_COMPILED, TOOK_OVER, CommandLog
from tlora_fx.training.options import ALPHA, EngineOptions
from tlora_fx.training.records import Command

logger = logging.getLogger(__name__)
PARTS = ("train_attn", "train_mlp", "train_unembed")
Layout = dict[str, dict[str, tuple[int, int]]]
_FIRST = "first"
_ATTENTION = ("attn", "attention")


class Engine:
    """A compiled base without members, with its weights.

    step        runs its members
    sampler     None where the base cannot be sampled from; `refusal` says why
    positions   tokens of a sequence at most; None: any number
    layout      by part of the base, the paths of its linears, with what they return and read
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options, self.base = options, options.spec()
        self.layout, self._sites = _sites(load_backbone(self.base))
        everything = self.job(_FIRST, dict.fromkeys(PARTS, True) | {"rank": 8, "seed": 0})
        slots = OpenSlots(
            sites=tuple(name for names in self._sites.values() for name in names),
            rows=max(options.max_rank, ALPHA * options.residents),
            jobs=options.residents, rank=options.max_rank, dropout=False,
        )  # fmt: skip
        # Layers are compiled by `LoggedLayers`, of who runs cycles.
        rows = StepOptions(compiled=options.compiled, wait_for_compile=False)
        model = compile([everything], open=slots)
        self.step = GroupStep(model, device=options.device, options=rows)
        self.step.prepare()
        self.step.release(_FIRST)
        self.positions = longest_sequence(self.step.model.backbone.model)
        self.sampler: Sampler | None = None
        self.refusal = ""
        try:
            self.sampler = Sampler(self.step)
        except GenerationError as error:
            self.refusal = str(error)

    @cached_property
    def is_by_kernels(self) -> bool:
        """Whether generated kernels compute all linears.

        In strict mode a token's numbers then have the same bits whatever else is in its row.
        cuBLAS and MKL round by how many tokens there are.
        """
        group = self.step.model.group
        on_gpu = self.step.mesh.device.type == "cuda"
        return on_gpu and not why_launched(group) and not library_products(group)

    def job(self, name: str, config: Mapping[str, Any]) -> Job:
        """The job of a model or version.

        config   its rank, seed, and which parts of the base it adapts
        raises   CommandRefused where it adapts nothing
        """
        targets = [each for part in PARTS if config[part] for each in self._sites[part]]
        if not targets:
            raise CommandRefused(
                "the model adapts nothing", expected=f"one at least of {', '.join(PARTS)}"
            )
        return Job(
            name=name, base=self.base, seed=config["seed"], max_steps=1, max_grad_norm=0.0,
            lr_scheduler_type="constant", data={"path": "none"},
            lora={"r": config["rank"], "lora_alpha": ALPHA, "target_modules": targets},
        )  # fmt: skip


@dataclass(slots=True)
class LogRecord:
    """A record in a log, with when the take-over began and how long it took.

    began   by the log's clock, as its cycles
    """

    log: CommandLog
    began: float

    def read(self) -> int | None:
        """See `TakeOverRecord`; the last cycle where a start without compiled layers came between.

        Their pieces run again, so layers are compiled before.
        """
        facts = self.log.facts()
        if (said := facts.get(TOOK_OVER)) is not None:
            return int(said["cycle"])
        return self.log.last_cycle() if facts.get(ONCE_COMPILED) else None

    def write(self, rounds: int) -> None:
        """See `TakeOverRecord`."""
        seconds = self.log.now() - self.began
        self.log.tell({TOOK_OVER: {"cycle": rounds, "began": self.began, "seconds": seconds}})


class LoggedLayers:
    """The layers of a step that runs the cycles of a log.

    state   as of `CompiledLayers`
    """

    def __init__(self, log: CommandLog, step: GroupStep) -> None:
        self.log, self._record = log, LogRecord(log, log.now())
        self._layers = CompiledLayers(
            step, self._record, callback=LoggedNotes(logger), unit="cycle", fixed_slots=True
        )
        self._told = ""
        past = log.facts().get(ONCE_COMPILED, [])
        self._past = [(after, until) for after, until in past if log.runs_again(after, until)]
        log.tell({ONCE_COMPILED: self._past})
        self._layers.begin(log.last_cycle())
        if self.state == "compiled" and log.facts().get(TOOK_OVER) is None:
            assert self._layers.after is not None
            self._record.write(self._layers.after)
        self._tell()

    @property
    def state(self) -> str:
        """See `CompiledLayers`."""
        return self._layers.state

    def look(self) -> None:
        """Hand over to compiled layers if they are there; between two cycles."""
        if self.state == "compiling":
            self._record.began = self.log.now()
            self._layers.look(self.log.last_cycle())
        self._tell()

    def plain_pieces(self, command: Command) -> int:
        """How many pieces of an answered command ran without compiled layers; its first ones.

        0 where all run without them.
        """
        if self.state != "compiled":
            return 0
        return sum(not self._ran_compiled(cycle) for cycle in self.log.cycles_of(command))

    def runs_otherwise(self, command: Command) -> bool:
        """Whether compiled layers ran an answered command, and there are none to run it again."""
        if self.state == "compiled":
            return False
        return any(self._ran_compiled(cycle) for cycle in self.log.cycles_of(command))

    def _ran_compiled(self, cycle: int) -> bool:
        after = self._layers.after if self.state == "compiled" else None
        if after is not None and cycle > after:
            return True
        return any(begin < cycle <= end for begin, end in self._past)

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        self._layers.close()

    def _tell(self) -> None:
        if self.state == self._told:
            return
        facts: dict[str, object] = {LAYERS: self.state}
        said = self.log.facts().get(TOOK_OVER)
        if self.state in ("off", "failed") and said is not None:
            # What runs from now on runs as before it.
            self._past.append((int(said["cycle"]), self.log.last_cycle()))
            facts |= {TOOK_OVER: None, ONCE_COMPILED: self._past}
        self.log.tell(facts)
        self._told = self.state


def _sites(backbone: Backbone) -> tuple[Layout, dict[str, list[str]]]:
    """By part, the linears of a base: their shapes by path, and as PEFT's target modules."""
    model: Any = backbone.model
    head = model.get_output_embeddings()
    layout: Layout = {part: {} for part in PARTS}
    names: dict[str, dict[str, None]] = {part: {} for part in PARTS}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        parent, name = path.split(".")[-2:] if "." in path else ("", path)
        if module is head:
            part = "train_unembed"
        else:
            part = "train_attn" if any(word in parent for word in _ATTENTION) else "train_mlp"
        layout[part][path] = module.out_features, module.in_features
        # A parent's name tells those apart that attention and MLP call alike.
        names[part][f"{parent}.{name}" if parent and module is not head else name] = None
    return layout, {part: list(own) for part, own in names.items()}
