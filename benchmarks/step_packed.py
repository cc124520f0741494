"""A transformers Llama on packed rows, frozen or with stacked adapters: what public parts reach.

Attention runs within each sequence of a packed row, through torch's varlen kernel. The adapters of
all jobs are stacked, a mask keeps each job's tokens to its ranks, and the frozen product is added
by cuBLAS into theirs (`Expand`). The loss runs in chunks that are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.step_mixes import ALPHA, Mix, Shape

ATTENTION = "benchmark_packed"
LOSS_ROWS = 2048
RATE = 1e-4


def llama(shape: Shape, weights: Mapping[str, Tensor], device: str, attention: str) -> Any:
    """A causal model around given weights, which it shares; nothing of it wants a gradient."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, packed_attention)
    config = shape.config()
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = factory.from_config(
            config, dtype=shape.torch_dtype, attn_implementation=attention
        )
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: weights[name] for name in names}, assign=True, strict=False)
    with torch.device(device):
        # Its frequencies are in no checkpoint, and have no values on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.requires_grad_(False)
    # Some versions of transformers make the frequencies on the CPU all the same.
    return model.to(device)


def packed_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **tables: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the sequences of a packed row; q, k, v [1, H, T, D]."""
    ends, longest = tables["cu_seq_lens_q"], tables["max_length_q"]
    if not q.is_cuda:
        return _attention_on_cpu(q, k, v, longest), None
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    q, k, v = (value[0].transpose(0, 1) for value in (q, k, v))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    return cast(Tensor, out).unsqueeze(0), None


def _attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """The same where all sequences have one length: a batch of them."""
    heads: list[Any] = [value[0] for value in (q, k, v)]
    q, k, v = (head.unflatten(1, (-1, length)).transpose(0, 1) for head in heads)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


class Stacked(nn.Module):
    """A frozen linear with the adapters of all jobs; `mask` is put in place for each row."""

    mask: Tensor

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = linear.weight
        outer, inner = linear.weight.shape
        like: dict[str, Any] = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = nn.Parameter(torch.randn(rank, inner, **like) * inner**-0.5)
        self.b = nn.Parameter(torch.zeros(outer, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, in] to [1, T, out]."""
        apply: Any = Expand.apply
        return cast(Tensor, apply(x[0], self.weight, self.a, self.b, self.mask)).unsqueeze(0)


class Expand(torch.autograd.Function):
    """The frozen product added to the adapters', each by cuBLAS.

    Nothing is written in place: torch.compile (2.11) silently gives zero gradients for a function
    whose forward ends in an in-place `addmm_` on a value of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        """[T, in] to [T, out]; a [R, in], b [out, R], mask [T, R]."""
        shrunk = (x @ a.t()) * mask
        ctx.save_for_backward(x, weight, a, b, mask, shrunk)
        return torch.addmm(shrunk @ b.t(), x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, a and b."""
        x, weight, a, b, mask, shrunk = ctx.saved_tensors
        (dy,) = grads
        ds = (dy @ b) * mask
        return torch.addmm(ds @ a, dy, weight), None, ds.t() @ x, dy.t() @ shrunk, None


def stack_adapters(model: Any, shape: Shape) -> list[Stacked]:
    """Replace every linear of every layer; returns what took their places."""
    made = []
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                owner, _, own = name.rpartition(".")
                made.append(Stacked(linear, sum(shape.ranks)))
                setattr(layer.get_submodule(owner), own, made[-1])
    return made


class Packed:
    """One training step of such a model: forward, backward, and the optimizer where it trains.

    sites   its stacked adapters; none: the frozen model, whose backward stops at the embeddings
    graph   the whole step as a CUDA graph, once `capture` made it
    """

    def __init__(self, model: Any, sites: Sequence[Stacked], shape: Shape, device: str) -> None:
        self.model, self.sites, self.shape, self.device = model, sites, shape, device
        self.trained = [p for site in sites for p in site.parameters() if p.requires_grad]
        fused: dict[str, Any] = {"fused": True, "capturable": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE, **fused) if self.trained else None
        self.row: dict[str, Any] = {}
        self.ids = torch.empty(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        # As run last, and as captured.
        self.embedded = self.captured = torch.empty(0)

    def load(self, mix: Mix) -> None:
        """Take the tokens of a mix."""
        self.graph = None
        self.ids = torch.cat([ids.reshape(-1) for ids in mix.ids(self.shape, self.device)])
        place = torch.arange(mix.tokens, device=self.device)
        ends = torch.arange(0, mix.tokens + 1, mix.length, dtype=torch.int32, device=self.device)
        self.row = {
            "position_ids": (place % mix.length)[None],
            "cu_seq_lens_q": ends,
            "max_length_q": mix.length,
            "use_cache": False,
        }
        # Within each sequence every token but the first is a target.
        self.wanted = torch.nonzero(place % mix.length < mix.length - 1)[:, 0]
        mask = _mask(mix, self.shape, self.device)
        for site in self.sites:
            site.mask = mask

    def gradients(self) -> list[Tensor]:
        """What a step gathers, of the frozen model the embeddings'; nothing is trained."""
        if self.graph is None:
            self._gather()
            return self._gathered()
        before = [p.detach().clone() for p in self.trained]
        self.graph.replay()
        with torch.no_grad():
            for parameter, value in zip(self.trained, before, strict=True):
                parameter.copy_(value)
        return self._gathered()

    def _gathered(self) -> list[Tensor]:
        embedded = self.embedded if self.graph is None else self.captured
        tensors = self.trained if self.sites else [embedded]
        return [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]

    def step(self) -> None:
        """One step."""
        if self.graph is None:
            self._gather()
            self._update()
        else:
            self.graph.replay()

    def capture(self, pool: Any = None) -> None:
        """Make the whole step a CUDA graph; it has run before.

        pool   of graphs of which one runs at a time; None: one of its own
        """
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._gather()
            self._update()
        self.graph, self.captured = graph, self.embedded

    def _gather(self) -> None:
        self.model.zero_grad(set_to_none=False)
        embedded = self.model.model.embed_tokens(self.ids[None])
        if not self.sites:
            self.embedded = embedded.requires_grad_()
        hidden = self.model.model(inputs_embeds=embedded, **self.row)[0][0]
        self.loss(hidden).backward()  # type: ignore[no-untyped-call]

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def loss(self, hidden: Tensor) -> Tensor:
        """The mean over all targets, from [T, H]."""
        total = hidden.new_zeros((), dtype=torch.float32)
        wanted: Any = self.wanted
        pairs = zip(wanted.split(LOSS_ROWS), (wanted + 1).split(LOSS_ROWS), strict=True)
        for rows, following in pairs:
            chunk = hidden[rows], self.ids[following]
            total = total + checkpoint(
                self._chunk, *chunk, use_reentrant=False, preserve_rng_state=False
            )
        return total / len(self.wanted)

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden).float()
        return F.cross_entropy(logits, targets, reduction="sum")


def _mask(mix: Mix, shape: Shape, device: str) -> Tensor:
    """[T, R], each job's scale where its tokens meet its ranks."""
    mask = torch.zeros(mix.tokens, sum(shape.ranks), dtype=shape.torch_dtype, device=device)
    rows, columns = mix.starts(), [0, *accumulate(shape.ranks)]
    for rank, own, ranks in zip(shape.ranks, pairwise(rows), pairwise(columns), strict=True):
        mask[slice(*own), slice(*ranks)] = ALPHA / rank
    return mask
