"""Whether generated kernels serve a group of sites, and the shapes of what they hand on.

Decided by metadata alone, so that fake tensors agree with real ones: devices, types, sizes,
strides of weights. TLORA_FX_KERNELS says

    auto        the default: kernels on CUDA where Triton is installed, for bases in 16 bits
    on          for bases in float32 too
    off         PyTorch everywhere
    interpret   kernels on the CPU too, under Triton's interpreter (with TRITON_INTERPRET=1)
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from tlora_fx.codegen.kernels.lora_b_backward import chunk_of
from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.codegen.spec import Dtype, KernelSpec, Layout
from tlora_fx.errors import TooManyJobs
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.tables import SiteGroup, tokens_of

logger = logging.getLogger(__name__)

# Rows of every TMA box are multiples of 16 bytes, and so are those of every vector load.
GRANULE = 16
SMALL_RANK = 32
_MIDDLE_RANK = 64
_FEW_JOBS, _MAX_JOBS = 64, 1024
_HALVES = (torch.bfloat16, torch.float16)
# Exact float32 products use no tensor cores, so cuBLAS does them faster; under the interpreter
# bfloat16 is silently wrong.
_BASES = {
    "on": (*_HALVES, torch.float32),
    "interpret": (torch.float16, torch.float32, torch.float64),
}
OLDEST = 80
# Makes a tensor of a shape and dtype.
Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Site:
    """One linear as kernels see it; hashable, a key of plans and tables."""

    inner: int
    outer: int
    dtype: Dtype
    adapter_dtype: Dtype
    rank_block: int
    width: int
    rows: int
    layout: Layout
    drops: bool
    job_capacity: int
    arch: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all fields, found once: every call of an operator asks for it several times."""
        return hash(astuple(self))

    def packed_rows(self, jobs: int) -> int:
        """P: what the jobs' ranks come to at most when each is padded to the rank block."""
        most = self.rows + jobs * (self.rank_block - 1)
        return min(most // self.rank_block * self.rank_block, jobs * self.width)

    @cached_property
    def strips(self) -> int:
        """Flags of a block of packed rows."""
        return -(-self.inner // STRIP) - (-self.outer // STRIP)

    @cached_property
    def tail(self) -> int:
        """T: rows of a and b, rounded up to what a GEMM likes."""
        return tail_of(self.rows)

    @cached_property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return chunk_of(KernelSpec("lora_b_backward", 16, 16, rank_block=self.rank_block))

    def chunks(self, tokens: int, jobs: int) -> int:
        """C: chunks of a row's segments, at most."""
        return -(-tokens // self.chunk) + jobs


@dataclass(frozen=True)
class KernelGroup:
    """A group of sites that kernels serve.

    sites     its linears
    jobs      J of the row
    recipes   what calls of its operators started; see launch_cache.py
    """

    sites: tuple[Site, ...]
    jobs: int
    recipes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, like: Tensor, group: SiteGroup) -> KernelGroup:
        """The shapes of a group that is known to be served; `like` has its dtype and device."""
        facts = _facts(like, group)
        known = _known.get(facts) if facts else None
        if known is None:
            known = cls._new(like, group)
            _remember(facts, known)
        return known

    @classmethod
    def _new(cls, like: Tensor, group: SiteGroup) -> KernelGroup:
        arch, jobs = arch_of(like.device), group.jobs
        capacity = job_capacity(jobs)
        sites = []
        for index, (a, b) in enumerate(zip(group.a, group.b, strict=True)):
            most = group.capacity(index)
            block = rank_block(most)
            turned = bool(group.weights) and group.weights[index].stride(1) != 1
            site = Site(
                inner=group.inner,
                outer=b.shape[1],
                dtype=_name(like.dtype),
                adapter_dtype=_name(a.dtype),
                rank_block=block,
                width=-(-most // block) * block,
                rows=a.shape[0],
                layout="in_out" if turned else "out_in",
                drops=group.drops,
                job_capacity=capacity,
                arch=arch,
            )
            sites.append(site)
        return cls(tuple(sites), jobs)

    def low_rank_rows(self, like: Tensor, make: Make | None = None) -> list[Tensor]:
        """S or dS of each site, [tokens, width], not filled.

        make   makes a tensor; by default `like.new_empty`
        """
        make, tokens = make or like.new_empty, tokens_of(like)
        return [make(tokens, site.width, dtype=like.dtype) for site in self.sites]

    def gradient_parts(self, like: Tensor, make: Make | None = None) -> list[Tensor]:
        """Buffers for the parts of dB, one for each chunk of dy, [C, width, out], not filled."""
        wide = torch.promote_types(torch.float32, like.dtype)
        make, tokens = make or like.new_empty, tokens_of(like)
        return [
            make(site.chunks(tokens, self.jobs), site.width, site.outer, dtype=wide)
            for site in self.sites
        ]

    def bits(self, like: Tensor, make: Make | None = None) -> list[Tensor]:
        """Dropout's bits of each site, uint8 [tokens, in / 8], not filled; [0] where none drops."""
        make, shape = make or like.new_empty, (tokens_of(like), -(-self.sites[0].inner // 8))
        sizes = [shape if site.drops else (0,) for site in self.sites]
        return [make(*size, dtype=torch.uint8) for size in sizes]


def kernel_group(x: Tensor, group: SiteGroup) -> KernelGroup | None:
    """The group as kernels see it, or None where PyTorch serves it."""
    device = x.device.type
    if device not in ("cuda", "cpu") or (device == "cpu" and kernel_mode() != "interpret"):
        return None
    facts = (*_facts(x, group), group.compute_dtype, kernel_mode())
    if len(facts) > _ALONE and (known := _known.get(facts)) is not None:
        return known
    reason = why_not(x, group)
    if reason:
        if device == "cuda":
            _say(reason, str(group.inner), tuple(str(b.shape[1]) for b in group.b))
        return None
    kernels = KernelGroup.of(x, group)
    if len(facts) > _ALONE:
        _remember(facts, kernels)
    return kernels


_known: dict[tuple[Any, ...], KernelGroup] = {}
_MAX_GROUPS = 4096
_ALONE = 2


def _facts(like: Tensor, group: SiteGroup) -> tuple[Any, ...]:
    """All that the shapes of a group follow from; () where sizes may be symbols."""
    if type(like) not in _PLAIN:
        return ()
    facts: list[Any] = [
        like.dtype, like.device, group.segments.shape[0], group.max_rank, group.drops,
    ]  # fmt: skip
    for a, b in zip(group.a, group.b, strict=True):
        facts += (a.shape, a.dtype, b.shape)
    for weight in group.weights:
        facts += (weight.shape, weight.stride())
    return tuple(facts)


_PLAIN = (Tensor, torch.nn.Parameter)


def _remember(facts: tuple[Any, ...], kernels: KernelGroup) -> None:
    if facts:
        if len(_known) >= _MAX_GROUPS:
            _known.clear()
        _known[facts] = kernels


def forget() -> None:
    """Forget all groups, and what their operators started."""
    _known.clear()


def why_not(x: Tensor, group: SiteGroup) -> str:
    """Why PyTorch serves a group on a device that has kernels, or ""."""
    asked = kernel_mode()
    if asked == "off":
        return "TLORA_FX_KERNELS=off"
    if not has_triton():
        return "Triton is not installed"
    if x.device.type == "cuda" and arch_of(x.device) < OLDEST:
        return "the GPU is older than compute capability 8.0"
    return why_no_kernel(x, group, asked)


def why_no_kernel(x: Tensor, group: SiteGroup, asked: str) -> str:
    """Reason why no GPU has kernels for a group under a mode, or ""; tensors may be anywhere."""
    if reason := _other_types(x, group, asked):
        return reason
    if group.inner % GRANULE or any(b.shape[1] % GRANULE for b in group.b):
        return f"sizes are not multiples of {GRANULE}"
    if any(not a.shape[0] for a in group.a):
        return "no job has an adapter here"
    if any(not _strides_fit(weight) for weight in group.weights):
        return "the weight's strides are neither a row's nor a column's"
    if group.jobs < 1:
        return "no jobs"
    return ""


def _other_types(x: Tensor, group: SiteGroup, asked: str) -> str:
    """Which types of a group have no kernels, or ""."""
    bases = _BASES.get(asked, _HALVES)
    adapters = (*bases, torch.bfloat16, torch.float32)
    if asked == "auto" and x.dtype == torch.float32:
        return "PyTorch is faster on a base in torch.float32; TLORA_FX_KERNELS=on takes kernels"
    if x.dtype not in bases or any(a.dtype not in adapters for a in group.a):
        return f"no kernels for {x.dtype} with adapters in {group.a[0].dtype}"
    if group.compute_dtype != x.dtype:
        return f"adapters compute in {group.compute_dtype} on a base in {x.dtype}"
    return ""


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def tail_of(rows: int) -> int:
    """T: what a site's adapters with so many rows take behind x or a weight."""
    return -(-rows // 64) * 64


def rank_block(most: int) -> int:
    """Multiple that ranks up to `most` are padded to.

    Wider blocks multiply and move more padding, narrower ones take more loops. With ranks 8 to 64 a
    step of Llama-3.2-3B's shape took 2 % less by blocks of 32 than by blocks of 64 at 1,280 tokens,
    and as long at 4,800 (H200).
    """
    if most <= SMALL_RANK:
        return 16
    return 32 if most <= _MIDDLE_RANK else 64


def job_capacity(jobs: int) -> int:
    """The number of jobs that a kernel of a row with this many is generated with.

    raises   TooManyJobs
    """
    if jobs > _MAX_JOBS:
        raise TooManyJobs(
            "a row holds more jobs than kernels' tables", expected=_MAX_JOBS, found=jobs
        )
    return max(_FEW_JOBS, 1 << (jobs - 1).bit_length())


def _strides_fit(weight: Tensor) -> bool:
    """Whether a weight [out, in] is stored by rows, or by columns as GPT-2's is."""
    outer, inner = weight.shape
    first, second = weight.stride()
    upright, turned = second == 1 and first >= inner, first == 1 and second >= outer
    return (upright and first % GRANULE == 0) or (turned and second % GRANULE == 0)


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability of the family whose instructions kernels use: 80, 90, 100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 90
    return torch.cuda.get_device_capability(device)[0] * 10


def _name(dtype: torch.dtype) -> Dtype:
    return cast("Dtype", str(dtype).removeprefix("torch."))


@lru_cache(maxsize=1024)
def _say(reason: str, inner: str, outers: tuple[str, ...]) -> None:
    """Log once a shape; sizes are texts, because symbols cannot be hashed."""
    shapes = ", ".join(f"{inner}→{outer}" for outer in outers)
    logger.info("PyTorch serves the adapters of %s: %s", shapes, reason)
