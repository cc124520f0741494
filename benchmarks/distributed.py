"""Plans over several GPUs, each beside what it must beat: under torchrun.

    torchrun --nproc-per-node 4 -m benchmarks.distributed

`fsdp`      a sharded base over a replicated one, at several numbers of tokens a GPU
`tensor`    one step over all GPUs beside one GPU, eager and as CUDA graphs, with nano-batches
`pipeline`  a schedule beside an event simulation with the measured times of its own stages, and
            stages cut by cost beside equal layers
`stages`    a pipeline's stages as CUDA graphs beside the same ones launched
`grid`      predicted times and memory beside measured ones, over plans, tokens and meshes
`controllers`  nano-batches chosen at run time beside the best fixed count (`--counts`)
`large`     a base of 70B's shape

Arms of one case take turns in rounds; a figure is the median over rounds of the slowest process.
`grid` and `controllers` print each row as it comes and write the file as they go; `--limit-seconds`
leaves out what would not end in time. On CPUs nothing but the code is tried: `--device cpu --layers
4 --hidden 64 --vocabulary 512`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import parser_of
from benchmarks.distributed_cases import CASES
from benchmarks.distributed_progress import Progress
from benchmarks.results_file import console, described
from benchmarks.step_mixes import Shape

PATIENCE = timedelta(minutes=5)


def main() -> None:
    """Run the cases and write what they found."""
    given = _arguments()
    for setting in filter(None, given.nccl.split(",")):
        name, value = setting.split("=")
        os.environ[f"NCCL_{name}"] = value
    rank = _begin(given.device)
    shape = Shape(
        layers=given.layers,
        hidden=given.hidden,
        intermediate=given.hidden * 7 // 2,
        heads=given.heads,
        key_value_heads=min(8, given.heads),
        vocabulary=given.vocabulary,
        dtype=given.dtype,
    )
    out = console() if rank == 0 else None
    found = described("distributed", given.device)
    found |= {"processes": dist.get_world_size(), "rounds": given.rounds, "cases": {}}
    path = given.out / f"distributed-{found['date']}.json"
    given.progress = Progress(
        path, found, leader=rank == 0, limit_seconds=given.limit_seconds
    )  # fmt: skip
    for name in given.cases.split(","):
        given.progress.begin(name)
        given.progress.keep(_tried(CASES[name], shape, given))
        if out is not None:
            _show(name, found["cases"][name], out, told=given.progress.rows > 0)
    dist.destroy_process_group()


def _tried(case: Callable[..., dict[str, Any]], shape: Shape, given: Any) -> dict[str, Any]:
    """A case's figures, or why it cannot run; the other cases go on."""
    try:
        return case(shape, given)
    except Exception as error:  # noqa: BLE001  (a case may fail in any way)
        return {"cannot": f"{type(error).__name__}: {str(error)[:600]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _show(name: str, found: Mapping[str, Any], out: Any, *, told: bool) -> None:
    """All figures of a case, but for rows that were told as they came."""
    out.rule(name, align="left")
    for key, value in found.items():
        if key == "rows" and told:
            continue
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            out.print(f"{key}: {row}", highlight=False, soft_wrap=True, markup=False)


def _begin(device: str) -> int:
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", timeout=PATIENCE, device_id=torch.device("cuda", local)
        )
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=PATIENCE)
    return dist.get_rank()


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--cases", default="fsdp,tensor,pipeline,grid")
    parser.add_argument("--tokens", default="16384,4800,1280", help="tokens a GPU")
    parser.add_argument("--micro-tokens", default="1280,4096", help="of pipelines' micro-batches")
    parser.add_argument("--length", type=int, default=160, help="tokens of a sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--arms", default="", help="of fsdp and tensor, between semicolons; all by default"
    )
    parser.add_argument("--plans", default="", help="of grid, between semicolons; default: all")
    parser.add_argument("--limit-seconds", type=float, default=0.0, help="of grid, controllers")
    parser.add_argument("--counts", default="1,2,4", help="of nano-batches, for controllers")
    parser.add_argument(
        "--region-layers", type=int, default=0,
        help="of controllers: consecutive layers compiled as one graph; default: as in training",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=120, help="of each controller")
    parser.add_argument(
        "--nccl", default="", help="settings, such as P2P_DISABLE=1: GPUs speak by host memory"
    )
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    parser.add_argument("--profile", default="", help="file to predict from, or a GPU's name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
