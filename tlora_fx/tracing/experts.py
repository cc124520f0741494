"""Mixtures of experts as two operators, put into models through transformers' ExpertsInterface.

What a model's own code does with a token for each expert by its number (`one_hot`, `nonzero`, a
loop over the experts that were hit) cannot be traced. Routing stays the model's own. Llama 4, DBRX
and LongCat-Flash know no such interface: a forward of ours stands in for theirs.

Each product is a module of its own, at the path of the parameter that it multiplies with, so that
what PEFT adapts by `target_parameters` is a site like any other. PEFT itself would add an adapter's
product to all experts' matrices; here it stands beside them. A router keeps its forward: only its
product with its weight, which it writes as `F.linear`, becomes a module.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import ROUTER_PRODUCT

IMPLEMENTATION = "tlora_fx"
#: Classes of transformers that do not say how their matrices lie: whether [E, in, out].
UNDECLARED = {"Llama4TextExperts": True, "LongcatFlashExperts": False}


def use_expert_products(model: nn.Module) -> None:
    """Make a throw-away copy of a base call `routed` in place of its experts' forward.

    model   PEFT may have wrapped it: its wrappers around experts, routers and weights of linears
            give way to adapted products
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, routed)
    adapters = _unwrapped(model)
    for module in list(model.modules()):
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = IMPLEMENTATION
        if type(module).__name__ in OWN_CODE:
            module.forward = types.MethodType(OWN_CODE[type(module).__name__], module)
        if is_experts(module):
            for name in product_names(module):
                _make_product(module, name, adapters.get((id(module), name)))
        if is_router(module):
            _make_router_product(module, adapters.get((id(module), "weight")))


def parameter_site(path: str, module: nn.Module, name: str) -> tuple[str, str] | None:
    """Path and kind of the site of an adapted parameter, None where it cannot be adapted.

    path, module   what holds the parameter
    name           of the parameter in it
    """
    if is_experts(module) and name in product_names(module):
        return f"{path}.{name}", "experts"
    if name != "weight":
        return None
    if is_router(module):
        return f"{path}.{ROUTER_PRODUCT}", "router"
    # A subclass may return more than the product.
    return (path, "parameter") if type(module) is nn.Linear else None


def is_router(module: nn.Module) -> bool:
    """Whether a router of transformers multiplies tokens with a weight [E, in] of its own."""
    weight, kind = module._parameters.get("weight"), type(module)
    known = "Router" in kind.__name__ and kind.__module__.startswith("transformers.")
    return known and not isinstance(module, nn.Linear) and weight is not None and weight.dim() == 2


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the matrices of all experts of a mixture, as transformers has them."""
    declared = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    return declared or type(module).__name__ in UNDECLARED


def product_names(experts: Any) -> tuple[str, str]:
    """The parameters that a mixture's products multiply with, in the order of its code."""
    return ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")


def _unwrapped(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Put experts, routers and linears in the place of PEFT's wrappers around their parameters.

    returns   the wrappers of experts and routers, by these' id and the parameter that each adapts
    """
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = {}
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if isinstance(module, ParamWrapper) and not isinstance(parent, ParamWrapper):
                inner = module.get_base_layer()
                if type(inner) is nn.Linear:
                    setattr(parent, child, AdaptedLinear(inner, module))
                    continue
                setattr(parent, child, inner)
                wrapper: nn.Module = module
                while isinstance(wrapper, ParamWrapper):
                    wrappers[id(inner), wrapper.parameter_name] = wrapper
                    wrapper = wrapper.base_layer
    return wrappers


def _make_product(experts: Any, name: str, wrapper: Any) -> None:
    """Replace a parameter of experts by the module that multiplies with it."""
    bias = experts._parameters.pop(f"{name}_bias", None)
    turned = bool(getattr(experts, "is_transposed", UNDECLARED.get(type(experts).__name__)))
    product: nn.Module = ExpertProduct(experts._parameters.pop(name), bias, turned)
    if wrapper is not None:
        # PEFT takes [E, out, in] where the class does not say how its matrices lie.
        product = AdaptedProduct(product, wrapper, turned and not hasattr(experts, "is_transposed"))
    experts.add_module(name, product)


def _make_router_product(router: Any, wrapper: Any) -> None:
    """Let a router's own code call a module where it multiplies with its weight."""
    product: nn.Module = RouterProduct(router._parameters.pop("weight"))
    if wrapper is not None:
        product = AdaptedLinear(product, wrapper)
    router.add_module(ROUTER_PRODUCT, product)
    router.weight = RouterWeight(product)


class RouterProduct(nn.Module):
    """Tokens times a router's weight [E, in]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, x: Tensor, dtype: torch.dtype | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """[T, E] of x [T, in]; the weight is cast to `dtype` before, where a router casts it."""
        weight = self.weight if dtype is None else self.weight.to(dtype)
        return F.linear(x, weight, bias)


class AdaptedLinear(nn.Module):
    """A product with a 2-D weight, and PEFT's adapter on this weight beside it, as on a linear.

    PEFT would add the adapter's product to the weight.
    """

    def __init__(self, base_layer: nn.Module, wrapper: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = wrapper.lora_A, wrapper.lora_B
        self.scaling = wrapper.scaling["default"]

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        """Compute the product as `base_layer` does, with adapters."""
        y: Tensor = self.base_layer(x, *how)
        a, b = self.lora_A["default"], self.lora_B["default"]
        adapted: Tensor = y + b(a(x.to(a.weight.dtype))) * self.scaling
        return adapted.to(y.dtype)


_OF_ANY_WEIGHT = frozenset({
    "dtype", "device", "shape", "size", "dim", "ndim", "numel", "is_floating_point",
})  # fmt: skip


class RouterWeight:
    """Stands for a router's weight in the router's own code, and catches its product.

    dtype   what the code cast the weight to, None: not cast
    """

    def __init__(self, product: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.product, self.cast = product, dtype

    @property
    def tensor(self) -> Tensor:
        """The weight itself, for code that does more than multiply with it.

        raises    BaseNotTraceable where an adapter would be left out
        """
        if isinstance(self.product, AdaptedLinear):
            raise BaseNotTraceable(
                "a router that a job adapts reads its weight otherwise than by F.linear(x, weight)",
                expected="F.linear, where the adapter stands beside the product",
                help="leave the router out of target_parameters and target_modules",
            )
        return self._stored

    @property
    def _stored(self) -> Tensor:
        base = self.product
        while isinstance(base, AdaptedLinear):
            base = base.base_layer
        weight: Tensor = base.weight  # type: ignore[assignment]
        return weight if self.cast is None else weight.to(self.cast)

    def type(self, dtype: torch.dtype) -> RouterWeight:
        """`Tensor.type` to another dtype."""
        return RouterWeight(self.product, dtype)

    def float(self) -> RouterWeight:
        """`Tensor.float`."""
        return RouterWeight(self.product, torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to` a dtype; to all else, the tensor."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return RouterWeight(self.product, args[0])
        return self.tensor.to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # What adapters leave as it is.
        return getattr(self._stored if name in _OF_ANY_WEIGHT else self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """`F.linear(x, weight, bias)` calls the product; all else gets the tensor."""
        named = dict(zip(("input", "weight", "bias"), args)) | (kwargs or {})  # noqa: B905
        weight = named.get("weight")
        if function is F.linear and isinstance(weight, cls):
            return weight.product(named["input"], weight.cast, named.get("bias"))
        plain, named = tree_map_only(cls, lambda own: own.tensor, (args, kwargs or {}))
        return function(*plain, **named)


class ExpertProduct(nn.Module):
    """Tokens times the matrices of their experts.

    weight   [E, out, in], turned [E, in, out]
    bias     [E, out], or None
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, turned: bool) -> None:
        super().__init__()
        self.weight, self.turned = weight, turned
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, K, out] of x [T, in] or [T, K, in], and of index [T, K]."""
        product: Tensor = torch.ops.tlora_fx.expert_linear(
            x, self.weight, self.bias, index, self.turned
        )
        return product


class AdaptedProduct(nn.Module):
    """The same with PEFT's adapter on each expert, which multiplies in the base's dtype.

    crossed   B reads the tokens and A makes the result, as both lie the other way than PEFT takes
    """

    def __init__(self, base_layer: nn.Module, wrapper: Any, crossed: bool) -> None:
        super().__init__()
        self.base_layer, self.crossed = base_layer, crossed
        self.lora_A, self.lora_B = wrapper.lora_A, wrapper.lora_B
        self.scaling, self.experts = wrapper.scaling["default"], wrapper.num_experts

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Compute the product as `ExpertProduct` does, with adapters."""
        y: Tensor = self.base_layer(x, index)
        a = self.lora_A["default"].weight.to(x.dtype).unflatten(0, (self.experts, -1))
        b = self.lora_B["default"].weight.to(x.dtype).unflatten(1, (-1, self.experts))
        first, second = (b.permute(2, 0, 1), a) if self.crossed else (a, b.permute(2, 0, 1))
        small = torch.ops.tlora_fx.expert_linear(x, first, None, index, self.crossed)
        made = torch.ops.tlora_fx.expert_linear(small, second, None, index, self.crossed)
        adapted: Tensor = y + made * self.scaling
        return adapted


def routed(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Forward of a mixture's experts that transformers calls in place of its own.

    module    holds their matrices and how these lie
    hidden    [T, H]
    index     [T, K], the experts of each token
    weights   [T, K], what each of them counts
    returns   [T, H]
    """
    up, down = (getattr(module, name) for name in product_names(module))
    x = up(hidden, index)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = down(x, index)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    mixed: Tensor = (x * weights.unsqueeze(-1)).sum(1)
    return mixed.to(hidden.dtype)


def _llama4(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A Llama 4 mixture's forward: its code gives all other experts zeros, which add nothing.

    hidden    [..., H]
    returns   [T, H], and the router's logits [T, E]
    """
    hidden = hidden.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden)
    index = logits.topk(self.top_k, dim=1).indices
    x = hidden.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)
    gate, up = self.experts.gate_up_proj(x, index).chunk(2, dim=-1)
    x = self.experts.down_proj(up * self.experts.act_fn(gate), index)
    return self.shared_expert(hidden) + x.sum(1), logits


def _dbrx(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The forward of DBRX's experts, whose matrices lie below each other, [E * F, H].

    hidden    [B, S, H]
    index     [T, K]
    weights   [T, K]
    returns   [B, S, H]
    """
    x, shape = hidden.reshape(-1, self.hidden_size), (self.num_experts, -1, self.hidden_size)
    gate, up, down = (w.view(shape) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    gated = torch.ops.tlora_fx.expert_linear(x, gate, None, index, False)
    wide = torch.ops.tlora_fx.expert_linear(x, up, None, index, False)
    x = self.mlp.activation_fn(gated) * wide
    x = torch.ops.tlora_fx.expert_linear(x, down, None, index, True)
    mixed: Tensor = (x * weights.unsqueeze(-1)).sum(1)
    return mixed.view(hidden.shape)


def _longcat(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The forward of LongCat-Flash's experts, of which the last ones return a token as it is.

    hidden    [T, H]
    index     [T, K]
    weights   [T, K]
    returns   [T, H]
    """
    count = self.num_routed_experts
    gate, up = self.gate_up_proj(hidden, index).chunk(2, dim=-1)
    x = self.down_proj(self.act_fn(gate) * up, index.clamp(max=count - 1))
    x = torch.where((index < count).unsqueeze(-1), x, hidden.unsqueeze(1))
    mixed: Tensor = (x * weights.unsqueeze(-1)).sum(1)
    return mixed.to(hidden.dtype)


#: What stands in for the forward of mixtures without transformers' interface, by their class.
OWN_CODE: dict[str, Callable[..., Any]] = {
    "Llama4TextMoe": _llama4, "DbrxExperts": _dbrx, "LongcatFlashExperts": _longcat,
}  # fmt: skip
