"""Measure what is no layer: embedding, head with loss, the end of a job's step, packing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.profile import Captured, HostPoint, LossPoint, OptimizerPoint, RootPoint
from tlora_fx.model.batch import pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes.lower_loss import LOSS
from tlora_fx.runtime.optimizer import JobOptimizer
from tlora_fx.runtime.profiling_clock import Piece, bytes_of, measure, measure_captured
from tlora_fx.runtime.profiling_rows import Called, Mix, handing_on, tokens_of

#: Tensors of a job whose step is timed: of a few layers, of a model of 8 billion parameters.
TENSORS = (14, 112, 448)


def root_points(
    model: SuperModel, rows: Sequence[Called], device: torch.device, rounds: int
) -> list[RootPoint]:
    """Embedding, positions and last norm, forward and backward."""
    last = model.layer_order()[-1]
    pieces = []
    for called in rows:
        leaf = called.loss[0].detach().clone()

        def instead(
            path: str, args: tuple[Any, ...], leaf: Tensor = leaf, place: int = called.hidden
        ) -> Tensor:
            if path == LOSS:
                return args[0]  # type: ignore[no-any-return]
            return leaf.detach().requires_grad_() if path == last else args[place]

        pieces.append(_root_piece(model, called, instead))
    _measure(rows, pieces, device, rounds)
    return [
        RootPoint(
            tokens=called.load.total,
            forward_ms=piece.forward_ms,
            backward_ms=piece.backward_ms,
            captured=captured_of(piece),
            saved_bytes=bytes_of(piece, device, ()).saved,
            noise=piece.noise,
        )
        for called, piece in zip(rows, pieces, strict=True)
    ]


def captured_of(piece: Piece) -> Captured | None:
    """A piece's times as CUDA graphs."""
    times = piece.captured_ms
    return None if times is None else Captured(forward_ms=times[0], backward_ms=times[1])


def _measure(
    rows: Sequence[Called], pieces: Sequence[Piece], device: torch.device, rounds: int
) -> None:
    """Time what each row needs, for rows that may run as CUDA graphs also so."""
    measure(pieces, device, rounds)
    small = [
        piece
        for called, piece in zip(rows, pieces, strict=True)
        if called.load.total <= CAPTURED_TOKENS
    ]
    measure_captured(small, device, rounds)


def _root_piece(model: SuperModel, called: Called, instead: Any) -> Piece:
    slope = torch.ones_like(called.loss[0])

    def forward() -> Tensor:
        with handing_on(model, instead):
            made: Tensor = model(called.row)
            return made

    def backward(made: Sequence[Tensor]) -> None:
        learning = [one for one in made if one.requires_grad]
        if learning:
            torch.autograd.backward(learning, [slope] * len(learning))

    return Piece(forward, backward)


def loss_points(
    model: SuperModel, rows: Sequence[Called], device: torch.device, rounds: int
) -> list[LossPoint]:
    """Head and loss by rows with a target."""
    loss = model.net.get_submodule(LOSS)
    pieces = []
    for called in rows:
        hidden, *tables = called.loss

        def forward(hidden: Tensor = hidden, tables: Sequence[Any] = tuple(tables)) -> Tensor:
            made: Tensor = loss(hidden.detach().requires_grad_(), *tables).sum()
            return made

        pieces.append(Piece(forward, torch.autograd.backward))
    _measure(rows, pieces, device, rounds)
    seen = [bytes_of(piece, device, list(loss.parameters())) for piece in pieces]
    return [
        LossPoint(
            targets=called.load.targets,
            forward_ms=piece.forward_ms,
            backward_ms=piece.backward_ms,
            captured=captured_of(piece),
            saved_bytes=one.saved,
            peak_bytes=max(one.forward_peak - one.saved, one.backward_peak),
            noise=piece.noise,
        )
        for called, piece, one in zip(rows, pieces, seen, strict=True)
        if called.load.targets
    ]


def optimizer_points(
    jobs: Sequence[Job], model: SuperModel, device: torch.device, rounds: int
) -> list[OptimizerPoint]:
    """The end of a job's step, for jobs of several sizes, with parameters laid out as in banks."""
    held = [bank for bank in model.banks.values() if not bank.a.is_meta]
    widths = [(bank.a.shape[1], bank.b.shape[1]) for bank in held] or [(8, 8)]
    ranks = sorted({bank.a.shape[0] for bank in held} or {4})
    found = []
    for rank in {ranks[0] // 2 or 1, ranks[0]}:
        for count in TENSORS:
            parameters = _parameters(widths, rank, count, device)
            optimizer = JobOptimizer(jobs[0], parameters, steps=1000)
            piece = Piece(partial(_end_step, optimizer))
            measure([piece], device, rounds)
            numbers = sum(p.numel() for p in parameters.values())
            point = {"tensors": count, "parameters": numbers}
            found.append(OptimizerPoint(**point, ms=piece.forward_ms, noise=piece.noise))
    return found


def _parameters(
    widths: Sequence[tuple[int, int]], rank: int, count: int, device: torch.device
) -> dict[str, nn.Parameter]:
    made: dict[str, nn.Parameter] = {}
    for place in range(count // 2):
        inner, outer = widths[place % len(widths)]
        for name, tensor in (
            ("A", torch.zeros(rank, inner, device=device)),
            ("B", torch.zeros(rank, outer, device=device).t()),
        ):
            parameter = nn.Parameter(tensor)
            parameter.grad = torch.full_like(tensor, 1e-3)
            made[f"{place}.lora_{name}"] = parameter
    return made


def _end_step(optimizer: JobOptimizer) -> None:
    optimizer.step(optimizer.gradient_norm())
    optimizer.zero_grad()


def host_points(
    model: SuperModel, mix: Mix, tokens: Sequence[int], length: int, device: torch.device
) -> list[HostPoint]:
    """Packing a row, and moving it to the device."""
    form = pack if model.group.form == "packed" else pad
    found = []
    for count in dict.fromkeys((tokens[0], tokens[-1])):
        jobs = tokens_of(model, mix, count, length)
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            form(jobs).to(device)
            taken.append(time.perf_counter() - started)
        found.append(HostPoint(tokens=count, ms=min(taken) * 1e3))
    return found
