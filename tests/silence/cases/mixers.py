"""Ways in which tokens or lines see each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.silence.cases.right import CausalConv
from tests.silence.modules import HIDDEN, Cases, attended, distance, mixes, with_part


class Recurrent(nn.Module):
    """A recurrent network over tokens."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.net = kind(HIDDEN, HIDDEN, batch_first=True, **options)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Its states."""
        return self.net(x)[0][..., :HIDDEN]


class Mixer(nn.Module):
    """A matrix of places."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(80, 80) / 9)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """All tokens by their places."""
        return self.matrix[: x.shape[1], : x.shape[1]] @ x


def view_as_other(x: Tensor) -> Tensor:
    """Lines and tokens exchanged by a view that is none."""
    return x.reshape(x.shape[1], x.shape[0], x.shape[2]).tanh().reshape(x.shape)


def written_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = x[:, :-1]
    return y


MIXERS: Cases = {
    **mixes(
        mean=lambda x: x - x.mean(1, keepdim=True),
        global_mean=lambda x: x - x.mean(),
        largest=lambda x: x / x.amax(1, keepdim=True),
        softmax=lambda x: x.softmax(1),
        softmax_of_lines=lambda x: x.softmax(0),
        log_softmax=lambda x: x.log_softmax(1),
        running_sum=lambda x: x.cumsum(1),
        running_product=lambda x: (1 + x / 9).cumprod(1),
        running_maximum=lambda x: x.cummax(1).values,
        running_logsumexp=lambda x: x.logcumsumexp(1),
        running_sum_of_lines=lambda x: x.cumsum(0),
        flip=lambda x: x.flip(1),
        flip_of_lines=lambda x: x.flip(0),
        roll=lambda x: x.roll(1, 1),
        roll_back=lambda x: x.roll(-1, 1),
        roll_of_lines=lambda x: x.roll(1, 0),
        sort=lambda x: x.sort(1).values,
        argsort=lambda x: x + x.argsort(1),
        difference=lambda x: torch.diff(x, dim=1, prepend=x[:, :1]),
        difference_ahead=lambda x: torch.diff(x, dim=1, append=x[:, -1:]),
        max_pool=lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
        average_pool=lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
        interpolated=lambda x: F.interpolate(
            F.avg_pool1d(x.transpose(1, 2), 2, 1, 1), size=x.shape[1]
        ).transpose(1, 2),
        fourier=lambda x: torch.fft.fft(x, dim=1).real,
        first_token=lambda x: x + x[:, :1],
        last_token=lambda x: x + x[:, -1:],
        first_line=lambda x: x + x[:1],
        last_line=lambda x: x + x[-1:],
        gathered=lambda x: x.gather(1, x.argsort(1)),
        index_of_places=lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)],
        every_second=lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
        view_exchanged=view_as_other,
        flat_softmax=lambda x: x.flatten(0, 1).softmax(0).view_as(x),
        flat_running_sum=lambda x: x.flatten(0, 1).cumsum(0).view_as(x),
        attention_of_all=lambda x: attended(x, None),
        attention_of_lines=lambda x: attended(x.transpose(0, 1), None).transpose(0, 1),
        covariance=lambda x: x @ (x.transpose(1, 2) @ x),
        causal_einsum=lambda x: torch.einsum(
            "bth,bsh,ts,bsk->btk", x, x, (distance(x) >= 0).to(x.dtype), x
        ),
        standard_deviation_flat=lambda x: x / (1 + x.flatten(0, 1).std(0, True)),
        standard_deviation=lambda x: x / (1 + x.std(1, keepdim=True)),
        any_token=lambda x: x * (1 + (x > 1).any(1, keepdim=True)),
        norm_of_tokens=lambda x: x / (1 + x.norm(dim=1, keepdim=True)),
        best_token=lambda x: x * (x.amax(-1) == x.amax((1, 2))[:, None])[..., None],
        quantile=lambda x: x - x.quantile(0.5, 1, keepdim=True),
        unfolded=lambda x: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1),
        scattered=lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
        index_added=lambda x: torch.zeros_like(x).index_add(
            1, torch.arange(x.shape[1], device=x.device) // 2, x
        ),
        bilinear=lambda x: x * x.sum(1, keepdim=True).tanh(),
        transposed=lambda x: x.transpose(0, 1).cumsum(0).transpose(0, 1),
        cdist=lambda x: torch.cdist(x, x).mean(-1, keepdim=True) * x,
        logsumexp=lambda x: x - x.logsumexp(1, keepdim=True),
        products=lambda x: x * (1 + x / 9).prod(1, keepdim=True),
        variance_and_mean=lambda x: x / (1 + torch.var_mean(x, 1, keepdim=True)[0]),
        topk=lambda x: x + x.topk(2, 1).values.sum(1, keepdim=True),
        kthvalue=lambda x: x - x.kthvalue(2, 1, keepdim=True).values,
        written_in_place=written_in_place,
        nonzero_rows=lambda x: x * (x > 0).nonzero().shape[0],
        masked_select=lambda x: x + x[x > 0].mean(),
    ),
    "convolution of both sides": with_part(lambda: CausalConv(2, 1)),
    "gru": with_part(lambda: Recurrent(nn.GRU)),
    "gru of both sides": with_part(lambda: Recurrent(nn.GRU, bidirectional=True)),
    "lstm": with_part(lambda: Recurrent(nn.LSTM)),
    "matrix of places": with_part(Mixer),
}
