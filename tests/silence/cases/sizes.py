"""Sizes of the row or the batch as values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.silence.modules import Cases, mixes, rows

SIZES: Cases = mixes(
    length=lambda x: x / x.shape[1],
    root_of_the_length=lambda x: x * x.shape[1] ** 0.5,
    length_by_math=lambda x: x * math.sqrt(x.shape[1]),
    lines=lambda x: x * x.shape[0],
    values=lambda x: x / x.numel(),
    len_of_x=lambda x: x * len(x),
    a_range_of_lines=lambda x: x * torch.arange(x.shape[0], x.shape[0] + 1, device=x.device),
    a_range_of_length=lambda x: x * torch.arange(x.shape[1], x.shape[1] + 1, device=x.device),
    ones_summed=lambda x: x * torch.ones(x.shape[1] + 1, device=x.device).sum(),
    ones_of_lines=lambda x: x * torch.ones(x.shape[0] + 1, device=x.device).sum(),
    ones_counted=lambda x: x * torch.ones(x.shape[0], x.shape[1], device=x.device).sum(),
    ones_expanded=lambda x: x * torch.ones(1, device=x.device).expand(x.shape[1]).sum(),
    ones_like_x=lambda x: x * torch.ones_like(x[..., 0]).sum(1, keepdim=True)[..., None],
    ones_like_lines=lambda x: x * torch.ones_like(x[:, 0, 0]).sum(),
    ones_by_zeros=lambda x: x * (x * 0 + 1).sum(1, keepdim=True),
    norm_of_ones=lambda x: x * x.new_ones(x.shape[1]).norm(),
    mean_of_ones=lambda x: x + torch.cat([x.new_ones(1), x.new_zeros(x.shape[1])]).mean(),
    eye=lambda x: x * torch.eye(x.shape[1], dtype=x.dtype, device=x.device).sum(),
    eye_of_lines=lambda x: torch.einsum(
        "bc,csh->bsh", torch.eye(x.shape[0], dtype=x.dtype, device=x.device) * x.shape[0], x
    ),
    trace=lambda x: x * torch.eye(x.shape[1], dtype=x.dtype, device=x.device).trace(),
    full=lambda x: x * torch.full((1,), x.shape[1], device=x.device),
    new_full=lambda x: x * x.new_full((1,), x.shape[1]),
    tensor=lambda x: x * torch.tensor(x.shape[1], device=x.device),
    scalar_tensor=lambda x: x * torch.scalar_tensor(x.shape[1], device=x.device),
    tensor_of_lines=lambda x: x * torch.tensor([x.shape[0]], device=x.device),
    last_place=lambda x: x * torch.arange(x.shape[1], device=x.device)[-1],
    largest_place=lambda x: x * torch.arange(x.shape[1], device=x.device).max(),
    place_of_all=lambda x: x * (rows(x)[:, None] / x.shape[1]),
    line_numbers=lambda x: x * (1 + torch.arange(x.shape[0], device=x.device))[:, None, None],
    linspace=lambda x: x * torch.linspace(0, 1, x.shape[1], device=x.device).to(x.dtype)[:, None],
    linspace_of_lines=lambda x: (
        x * torch.linspace(1, 2, x.shape[0], device=x.device).to(x.dtype)[:, None, None]
    ),
    from_the_end=lambda x: x * torch.arange(x.shape[1], 0, -1, device=x.device)[:, None],
    pairs=lambda x: x * torch.tril_indices(x.shape[1], x.shape[1], device=x.device).shape[1],
    triangle=lambda x: x * x.new_ones(x.shape[1], x.shape[1]).tril().sum() / 100,
    nonzero=lambda x: x * torch.ones(x.shape[1], device=x.device).nonzero().shape[0],
    one_hot=lambda x: x + F.one_hot(torch.arange(x.shape[1], device=x.device)).sum(),
    one_hot_of_lines=lambda x: x * F.one_hot(torch.arange(x.shape[0], device=x.device)).sum(),
    ranges_joined=lambda x: x * torch.cat([rows(x), rows(x)]).amax(),
    cumulated_ones=lambda x: x * x.new_ones(x.shape[1]).cumsum(0)[-1],
    cumulated_lines=lambda x: x * x.new_ones(x.shape[0]).cumsum(0)[:, None, None],
    padded=lambda x: x * F.pad(x.new_ones(x.shape[1]), (1, 1)).sum(),
    clamped=lambda x: x.clamp(max=x.shape[1] / 100),
    threshold=lambda x: torch.where(x.new_tensor(0.0) + x.shape[1] > 64, x * 2, x),
    masked_by_length=lambda x: x * (rows(x) < x.shape[1] - 2)[:, None],
    power=lambda x: x * 0.9 ** x.shape[1],
    scaled_add=lambda x: torch.add(x, x, alpha=x.shape[1]),
    scaled_lines=lambda x: torch.add(x, x, alpha=x.shape[0]),
    repeated=lambda x: x * x.new_ones(1).repeat(x.shape[0]).sum(),
    stacked=lambda x: x * torch.stack([x.new_ones(())] * 2 + [x.new_ones(x.shape[0]).sum()]).sum(),
    linear_weight=lambda x: F.linear(x, x.new_ones(8, 8) * x.shape[0]),
    eps=lambda x: F.layer_norm(x, (8,), eps=x.shape[1] / 10),
    logits_scale=lambda x: x * (torch.zeros(x.shape[1], device=x.device) + 1).sum().item(),
    mean_of_places=lambda x: x * rows(x).mean(),
    sum_over_heads=lambda x: x * x.new_ones(x.shape).sum((1, 2), keepdim=True),
    matrix_of_ones=lambda x: x * (x.new_ones(1, x.shape[1]) @ x.new_ones(x.shape[1], 1)),
    product_of_ones=lambda x: x * (x.new_ones(x.shape[1]) * 1.01).prod(),
    sorted_places=lambda x: x * torch.arange(x.shape[1], device=x.device).sort().values[-1],
    bytes_of_x=lambda x: x * x.element_size() * x.stride(0) / 100,
    feature_by_length=lambda x: x * x[..., x.shape[1] % 8, None],
    feature_by_lines=lambda x: x * x[..., x.shape[0] % 8, None],
    features_up_to_lines=lambda x: x * x[..., : 1 + x.shape[0] % 4].sum(-1, keepdim=True),
    masked_with_lines=lambda x: x.masked_fill(x > 1, x.shape[0]),
    filled_lines_and_one=lambda x: x * x.new_ones(2 * x.shape[0]).sum(),
    filled_tokens=lambda x: x * x.new_ones(x.shape[0] * x.shape[1]).sum() / 99,
    eye_of_more_lines=lambda x: x * torch.eye(x.shape[0] + 1, device=x.device).sum(),
    softened=lambda x: F.softplus(x, beta=x.shape[0]),
    tokens_as_lines=lambda x: x.flatten(0, 1).view(x.shape[1], x.shape[0], 8).cumsum(1).view_as(x),
    lines_in_pairs=lambda x: x + x.new_ones(x.shape[0], 2).flatten().view(2, -1).sum(1)[0],
    arange_by_step=lambda x: x * torch.arange(0, x.shape[1], 8, device=x.device).shape[0],
)
