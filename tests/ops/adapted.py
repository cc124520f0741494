"""A module whose only parameters are adapters, with gradients that there are already."""

from __future__ import annotations

import torch
from torch import nn

from tlora_fx.ops import multi_lora_linear
from tlora_fx.parallel import capturing


class Adapted(nn.Module):
    """A frozen linear with the adapters of some jobs, read once or twice.

    tables   arguments behind a and b: those of a captured graph must be those of a call before it
    """

    def __init__(self, made, times=1, scaled=False, tables=None):
        super().__init__()
        self.a, self.b = nn.Parameter(made.a.clone()), nn.Parameter(made.b.clone())
        self.made, self.times, self.scaled = made, times, scaled
        self.tables = made.arguments()[5:] if tables is None else tables
        for leaf in (self.a, self.b):
            drawn = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1))
            leaf.grad = drawn.to(leaf)

    def forward(self):
        """Losses, whose sum has a gradient of its own at each token."""
        a = self.a * 2 if self.scaled else self.a
        total = 0.0
        for _ in range(self.times):
            frozen = self.made.x, self.made.weight, self.made.bias
            total = total + multi_lora_linear(*frozen, a, self.b, *self.tables)
        return total.square().sum(-1).flatten()


def name_adapters(monkeypatch):
    """Let kernels add the gradients of an `Adapted`, as of a Shared Super-Model's banks."""
    monkeypatch.setattr(capturing, "adapters_read_once", lambda model: [model.a, model.b])


def both(make, monkeypatch):
    """Gradients where kernels add them, and where autograd gives them back."""
    name_adapters(monkeypatch)
    found = []
    for adding in (True, False):
        model = make()
        with monkeypatch.context() as patch:
            if not adding:
                patch.setattr("tlora_fx.ops.kernels.dispatch.targets_of", lambda _: None)
            capturing.add_gradients(model(), model, 10**9)
        found.append([model.a.grad, model.b.grad])
    return found
