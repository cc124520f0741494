"""SD-LoRA by its formula, in plain PyTorch: nothing here comes from tlora-fx or PEFT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Decoupled(nn.Module):
    """W x + sum of alpha_k B_k A_k x / |B_k A_k| + alpha_t B_t A_t x, over full products.

    earlier   A_k and B_k as task k left them, without any scaling
    """

    def __init__(self, linear, earlier, alphas, a, b):
        super().__init__()
        self.linear, self.earlier = linear, earlier
        self.alphas, self.a, self.b = (nn.Parameter(value.clone()) for value in (alphas, a, b))

    def forward(self, x):
        """One linear."""
        y = self.linear(x) + self.alphas[-1] * (x @ (self.b @ self.a).T)
        for alpha, (a, b) in zip(self.alphas, self.earlier, strict=False):
            product = b @ a
            y = y + alpha * (x @ (product / torch.linalg.matrix_norm(product)).T)
        return y

    def ended(self):
        """What the next task is made of: all directions, and the magnitudes that are reached."""
        a, b, alphas = (value.detach().clone() for value in (self.a, self.b, self.alphas))
        alphas[-1] *= torch.linalg.matrix_norm(b @ a)
        return [*self.earlier, (a, b)], alphas


class Oracle:
    """One job alone.

    model     transformers' own, with the base's weights; its linears are replaced
    starts    by path of a linear: A and B of this task
    before    by path, what `Decoupled.ended` gave in the task before; None in the first
    """

    def __init__(self, model, starts, before=None):
        self.model = model.requires_grad_(False)
        self.model.set_attn_implementation("sdpa")
        self.sites = {}
        for path, (a, b) in starts.items():
            earlier, alphas = before[path] if before else ([], a.new_zeros(0))
            parent, _, last = path.rpartition(".")
            linear = model.get_submodule(path)
            site = Decoupled(linear, earlier, torch.cat([alphas, alphas.new_ones(1)]), a, b)
            setattr(model.get_submodule(parent), last, site)
            self.sites[path] = site

    def loss(self, batch):
        """The mean loss over all targets of a batch of (ids, labels), each sample by itself."""
        total, count = 0, 0
        for ids, labels in batch:
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
            targets = torch.tensor(labels[1:])
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
        return total / count

    def gradients(self, batch):
        """Of the loss of one batch, by path: those of A, B and the magnitudes."""
        self.loss(batch).backward()
        found = {p: (s.a.grad, s.b.grad, s.alphas.grad) for p, s in self.sites.items()}
        self.model.zero_grad()
        return found

    def train(self, batches, rate, decay, max_norm):
        """AdamW with clipping at a constant rate; returns the losses."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, max_norm)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def ended(self):
        """By path, what the next task is made of."""
        return {path: site.ended() for path, site in self.sites.items()}
