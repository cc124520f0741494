"""A tiny decoder into which a test puts what it wants: a mixer of tokens, an outer loop, a head.

All takes ids alone, as batch form calls it, and ids with positions, as packed form does.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.silence.oracle import VOCABULARY

HIDDEN = 8
Make = Callable[[], nn.Module]
Cases = Mapping[str, Make]
#: From a layer and its hidden states [B, S, H] to others of the same shape.
Mix = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """x + out(mix(tanh(inner(x)))).

    mix    a function of the layer and its hidden states
    zero   `out` starts at zero, so that only an adapter lets through what `mix` does
    """

    def __init__(self, mix: Mix, *, zero: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = mix
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, S, H]."""
        return x + self.out(self.mix(self, torch.tanh(self.inner(self.norm(x)))))


class Decoder(nn.Module):
    """An embedding, layers, a head; without a mixer every token is by itself.

    positions   from the model, ids and positions (None in batch form) to what is added, if anything
    """

    def __init__(
        self,
        mix: Mix = lambda layer, x: x,
        *,
        layers: int = 1,
        zero: bool = False,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(96, HIDDEN)
        self.layers = nn.ModuleList(
            Layer(mix, zero=zero) if make is None else make() for _ in range(layers)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> Tensor:
        """Logits [B, S, V]."""
        return self.logits(self.run(self.embedded(input_ids, position_ids)))

    def embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """The first hidden states."""
        return self.embed(ids)

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The head."""
        return self.head(x)


def decoder(mix: Mix = lambda layer, x: x, **options: Any) -> Callable[[], nn.Module]:
    """Makes a decoder of seeded weights in float64."""
    return seeded(lambda: Decoder(mix, **options))


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights each time, in float64."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make().double()

    return made


def mixes(**functions: Callable[[Tensor], Tensor]) -> dict[str, Make]:
    """A decoder for each function of hidden states."""
    return {
        name.replace("_", " "): decoder(lambda layer, x, f=function: f(x))
        for name, function in functions.items()
    }


def with_part(part: Callable[[], nn.Module], **options: Any) -> Make:
    """A decoder whose every layer has a module of its own as mixer."""
    return seeded(lambda: Decoder(make=lambda: Layer(part()), **options))


def rows(x: Tensor) -> Tensor:
    """The places of x [S], in its dtype."""
    return torch.arange(x.shape[1], device=x.device, dtype=x.dtype)


# Attention written out.


def heads(x: Tensor) -> Tensor:
    """[B, S, H] as [B, 2, S, H / 2]."""
    return x.unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2)


def attended(x: Tensor, seen: Tensor | None, bias: Tensor | float = 0.0) -> Tensor:
    """Attention of x with itself where `seen` [.., S, S] says so."""
    q = heads(x)
    scores = q @ q.transpose(2, 3) / 2 + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


def distance(x: Tensor) -> Tensor:
    """How far each query [S, 1] is behind each key [1, S]."""
    place = torch.arange(x.shape[1], device=x.device)
    return place[:, None] - place[None, :]


def causal(layer: Any, x: Tensor) -> Tensor:
    """Causal attention."""
    return attended(x, distance(x) >= 0)


def ahead(count: int) -> Mix:
    """Attention that sees so many tokens ahead."""
    return lambda layer, x: attended(x, distance(x) >= -count)


def before(x: Tensor, count: int = 1) -> Tensor:
    """Each token's predecessor; zero where there is none."""
    return F.pad(x, (0, 0, count, 0))[:, : x.shape[1]]


def blocks(x: Tensor, size: int) -> Tensor:
    """x cut into blocks of tokens, each in reverse."""
    padded = F.pad(x, (0, 0, 0, -x.shape[1] % size))
    return padded.unflatten(1, (-1, size)).flip(2).flatten(1, 2)[:, : x.shape[1]]


class Ending(Decoder):
    """A decoder with something between layers and head."""

    def __init__(self, end: Callable[[Tensor], Tensor], mix: Any = causal) -> None:
        super().__init__(mix)
        self.end = end

    def logits(self, x: Tensor) -> Tensor:
        """Head of what is made of the last hidden states."""
        return self.head(self.end(x))


# Attention through transformers' interface, which packed form replaces.


class Attention(nn.Module):
    """Attention that asks transformers' interface for its implementation.

    eager   what runs where none is set: (module, q, k, v, mask, **rest) to [B, S, heads, D]
    rest    what else it hands on
    mask    from x to the mask that it hands on
    """

    def __init__(
        self,
        eager: Callable[..., tuple[Tensor, None]],
        rest: Callable[[Tensor], dict[str, Any]] = lambda x: {},
        mask: Callable[[Any, Tensor], Tensor | None] = lambda config, x: None,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.config = config or types.SimpleNamespace(_attn_implementation="eager")
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.eager, self.rest, self.mask = eager, rest, mask

    def forward(self, x: Tensor) -> Tensor:
        """Residual attention."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        kind = self.config._attn_implementation
        attend = self.eager if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
        mask = self.mask(self.config, x)
        out, _ = attend(self, q, k, v, mask, scaling=0.5, dropout=0.0, **self.rest(x))
        return x + self.out(out.flatten(2))


def eager(
    seen: Callable[[Tensor], Tensor] = lambda far: far >= 0,
    bias: Callable[[Any, Tensor], Any] = lambda module, far: 0.0,
) -> Callable[..., tuple[Tensor, None]]:
    """Attention written out with a mask and a bias of the distance."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        place = torch.arange(q.shape[2], device=q.device)
        far = place[:, None] - place[None, :]
        scores = q @ k.transpose(2, 3) * rest.get("scaling", 1.0)
        if "softcap" in rest:
            scores = torch.tanh(scores / rest["softcap"]) * rest["softcap"]
        scores = scores + bias(rest, far)
        scores = scores.masked_fill(~seen(far), -torch.inf) if mask is None else scores + mask
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    return attend
