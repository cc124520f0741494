"""Specs that stand for all: what CI compiles for every architecture, and what people look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tlora_fx.codegen.spec import KINDS, KernelSpec, Kind

#: Shapes of the linears of a Llama-3-8B layer: square, widening, narrowing, keys and values.
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024))

#: By kind, what else a spec may be besides plain: each entry is one spec.
_FORMS: dict[Kind, tuple[dict[str, object], ...]] = {
    "pack": ({"extend": "tail"}, {"rank_block": 64}),
    "shrink": ({"dropout": True}, {"rank_block": 64}, {"sites": 3, "dropout": True}),
    "forward": ({"bias": True}, {"rank_block": 64}, {"weight_layout": "in_out"}),
    "input_gradient": (
        {"dropout": True},
        {"dropout": True, "rank_block": 64},
        {"weight_layout": "in_out"},
        {"dropout": True, "accumulate": True},
    ),
    "lora_b_backward": ({"rank_block": 64}, {"extend": "copy"}),
    "sum_ds": ({"rank_block": 64}, {"extend": "tail"}),
    "lora_a_backward": ({"dropout": True}, {"rank_block": 64}, {"sites": 3, "dropout": True}),
    "sum_gradients": ({"rank_block": 64}, {"adapter_dtype": "bfloat16"}),
    "expand": (
        {"dropout": True, "accumulate": True},
        {"rank_block": 64},
        {"bias": True},
        {"sites": 3, "dropout": True},
    ),
}


def forms(kind: Kind) -> Iterator[KernelSpec]:
    """The plain spec of a kind for a widening linear, then its other forms."""
    plain = KernelSpec(kind, 4096, 14336)
    yield plain
    for form in _FORMS[kind]:
        yield replace(plain, **form)  # type: ignore[arg-type]


def everything(kind: Kind) -> Iterator[KernelSpec]:
    """All forms of a kind for all shapes, in bf16 and fp16."""
    for spec in forms(kind):
        for inner, outer in SHAPES:
            for dtype in ("bfloat16", "float16"):
                yield replace(spec, inner=inner, outer=outer, dtype=dtype)


def few() -> Iterator[KernelSpec]:
    """Two specs a kind: the plain one and the first other form."""
    for kind in KINDS:
        plain, form, *_ = forms(kind)
        yield plain
        yield form


def of(extent: str) -> list[KernelSpec]:
    """`few`, all `forms`, or `everything`, of all kinds."""
    if extent == "few":
        return list(few())
    each = forms if extent == "forms" else everything
    return [spec for kind in KINDS for spec in each(kind)]
