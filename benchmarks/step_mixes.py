"""What `step.py` trains: the shape of the base, eight jobs, and how many sequences each brings."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor

#: Both matrices of a mixture's experts.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
RANKS = (2, 4, 8, 16, 2, 4, 8, 16)
ALPHA = 16
SEED = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with random weights; the defaults are Llama-3-8B's.

    dropout   of every job's adapters
    targets   what they adapt, as PEFT reads it
    parameters   matrices of experts that they adapt, as PEFT's `target_parameters`
    ranks     one a job
    """

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 128256
    dtype: str = "bfloat16"
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    ranks: tuple[int, ...] = RANKS
    parameters: tuple[str, ...] = ()

    @property
    def target_modules(self) -> str | list[str]:
        """As PEFT wants them."""
        return self.targets if isinstance(self.targets, str) else list(self.targets)

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def config(self, **changes: Any) -> Any:
        """The transformers config."""
        import transformers

        fields = self.sizes() | {
            "intermediate_size": self.intermediate,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
        }
        return transformers.LlamaConfig(**(fields | changes))

    def sizes(self) -> dict[str, Any]:
        """What configs of all shapes name alike."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }

    def frozen_parameters(self) -> int:
        """Elements of all matrices that a token is multiplied with; the embedding is read only."""
        width = self.hidden // self.heads * self.key_value_heads
        attention = 2 * self.hidden * (self.hidden + width)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocabulary


@dataclass(frozen=True, slots=True)
class Qwen(Shape):
    """A dense Qwen with random weights; the defaults are Qwen3-8B's.

    family   as transformers calls it
    """

    layers: int = 36
    intermediate: int = 12288
    vocabulary: int = 151936
    family: str = "qwen3"

    def config(self, **changes: Any) -> Any:
        """The transformers config."""
        from transformers import AutoConfig

        fields = self.sizes() | {
            "intermediate_size": self.intermediate,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
        }
        return AutoConfig.for_model(self.family, **(fields | changes))


@dataclass(frozen=True, slots=True)
class Mixture(Shape):
    """A Qwen3-MoE with random weights; the defaults are Qwen3-30B-A3B's, with half its layers.

    intermediate   of each expert
    chosen         experts that a token goes through
    """

    layers: int = 24
    hidden: int = 2048
    intermediate: int = 768
    heads: int = 32
    key_value_heads: int = 4
    vocabulary: int = 151936
    targets: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    head_width: int = 128
    experts: int = 128
    chosen: int = 8

    def config(self, **changes: Any) -> Any:
        """The transformers config."""
        import transformers

        fields = self.sizes() | {
            "moe_intermediate_size": self.intermediate,
            "head_dim": self.head_width,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
        }
        return transformers.Qwen3MoeConfig(**(fields | changes))

    def frozen_parameters(self) -> int:
        """Elements of all matrices that a token is multiplied with: of the experts it chose."""
        width = (self.heads + self.key_value_heads) * self.head_width
        routed = self.experts + 3 * self.chosen * self.intermediate
        return self.layers * self.hidden * (2 * width + routed) + self.hidden * self.vocabulary


#: Dense bases by name.
BASES: dict[str, Shape] = {
    "llama": Shape(),
    "llama-3b": Shape(layers=28, hidden=3072, intermediate=8192, heads=24),
    "qwen2.5-7b": Qwen(
        family="qwen2",
        layers=28,
        hidden=3584,
        intermediate=18944,
        heads=28,
        key_value_heads=4,
        vocabulary=152064,
    ),
    "qwen3-8b": Qwen(),
}

#: What parts of the longest sequence the sequences of an uneven mix have, in turns.
PARTS = (1.0, 0.35, 0.7, 0.2, 0.9, 0.5)


@dataclass(frozen=True, slots=True)
class Mix:
    """Sequences of each job in one step.

    length   of all sequences
    uneven   it is the longest one's; arms of others take sequences of one length alone
    """

    name: str
    batches: tuple[int, ...]
    length: int = 160
    uneven: bool = False

    def lengths(self) -> list[list[int]]:
        """Of each job's sequences."""
        parts = cycle(PARTS if self.uneven else (1.0,))
        return [[round(next(parts) * self.length) for _ in range(n)] for n in self.batches]

    @property
    def tokens(self) -> int:
        """Of all jobs."""
        return sum(map(sum, self.lengths()))

    def ids(self, shape: Shape, device: str) -> list[Tensor]:
        """Random token ids, int64 [batch, length] for each job; uneven ones are cut from these."""
        generator = torch.Generator().manual_seed(SEED)
        drawn = [
            torch.randint(0, shape.vocabulary, (batch, self.length), generator=generator)
            for batch in self.batches
        ]
        return [ids.to(device) for ids in drawn]

    def starts(self) -> list[int]:
        """Where each job's tokens begin in one line, and where the last one's end."""
        return [0, *(self.length * count for count in accumulate(self.batches))]


MIXES = {
    "gsm8k": Mix("gsm8k 30x160", (1, 1, 2, 2, 4, 4, 8, 8)),
    "ones": Mix("ones 8x160", (1,) * 8),
    "wide": Mix("wide 64x256", (8,) * 8, length=256),
    "long": Mix("long 8x1024", (1,) * 8, length=1024),
}
