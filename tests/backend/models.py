"""Small PEFT models, and one training step of each: compiled against eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from tests.models import FAMILIES, VOCABULARY, assert_close
from tlora_fx.backend import BackendWarning, forget, lower_graph, read_options


class Net(nn.Module):
    """Two linears around a nonlinearity, for what needs no transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 12] to [..., 12]."""
        return self.down(torch.tanh(self.up(x)))


class Transposed(Net):
    """With weights as GPT-2 stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(20, 12), Conv1D(12, 20)


class Checkpointed(Net):
    """Computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        return checkpoint(super().forward, x, use_reentrant=False)


class Gated(Net):
    """With a third linear that reads the same input as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 12] to [..., 12]."""
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def net(dtype: torch.dtype = torch.float32, kind: type[Net] = Net, **lora: Any) -> Any:
    """A small net with a LoRA branch on all linears."""
    lora = {"target_modules": ["up", "down", "gate"], "fan_in_fan_out": kind is Transposed, **lora}
    return wrapped(kind().to(dtype), **lora)


def language_model(
    family: str, dtype: torch.dtype = torch.float32, layers: int = 1, **lora: Any
) -> Any:
    """A transformers model of one layer, wrapped by PEFT."""
    name, arguments = FAMILIES[family].config
    depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**arguments, **depth})
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return wrapped(base, **{"target_modules": list(FAMILIES[family].targets), **lora})


def wrapped(base: nn.Module, **lora: Any) -> Any:
    """A model with adapters whose B is not zero."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(**{"r": 3, "lora_alpha": 6, **lora}))
    start(model)
    return model


def start(model: nn.Module) -> None:
    """Give every B random values, so that A gets a gradient."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.2)


def ids(lines: int, width: int, seed: int = 3) -> Tensor:
    """Token ids [lines, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (lines, width), generator=generator)


@dataclass
class Step:
    """What one forward and backward give."""

    output: Tensor
    gradients: dict[str, Tensor]


def train(model: nn.Module, run: Callable[..., Any], x: Tensor) -> Step:
    """A forward and backward of a model, or of what compiles it, on ids or on numbers."""
    model.zero_grad()
    out = run(x) if x.is_floating_point() else run(input_ids=x, labels=x)
    output = getattr(out, "logits", out)
    (output.float().pow(2).sum() if output is out else out.loss).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(output.detach(), found)


def assert_equal_steps(found: Step, expected: Step, bound: float) -> None:
    """Output and all gradients agree within a relative bound."""
    assert_close(found.output, expected.output, bound, "output")
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_close(found.gradients[name], gradient, bound, name)


@dataclass
class Lowering:
    """A backend for torch.compile that lowers, and leaves the rest to plain AOTAutograd.

    counts     (lowered, left) of each graph
    warnings   what users were told
    graphs     after lowering
    """

    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        forget()
        self.counts: list[tuple[int, int]] = []
        self.warnings: list[str] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Lower one graph."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.counts.append(lower_graph(gm, read_options(None, self.options)))
        self.warnings += [str(w.message) for w in told if w.category is BackendWarning]
        self.graphs.append(gm)
        return aot_eager(gm, inputs)

    def compile(self, model: nn.Module) -> Any:
        """The model, compiled with this backend."""
        return torch.compile(model, backend=self)

    @property
    def lowered(self) -> int:
        """Branches lowered in all graphs."""
        return sum(lowered for lowered, _ in self.counts)

    @property
    def left(self) -> int:
        """Branches left in all graphs."""
        return sum(left for _, left in self.counts)
