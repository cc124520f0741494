"""A recipe starts what was written down, with the addresses of another call's tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tlora_fx.codegen.launching import KernelLaunch, tape
from tlora_fx.ops.kernels.launch_cache import NotRecordable, Recording


@dataclass
class Box:
    """Looks like a descriptor of Triton's."""

    base: Any
    block_shape: list[int]


def noted(*arguments, tensors, by_address=True):
    """What a recipe gives a launch, by tensors in the place of those of the recording."""
    given = []

    def start(stream, arguments):
        given.append((stream, arguments))

    recipe = Recording([KernelLaunch(start, arguments, by_address)]).recipe(tensors)

    def again(others, loose=0):
        done = recipe.serve(list(others), torch.empty, 7, loose)
        return given.pop() if done else None

    return again


def test_addresses_follow_the_tensors():
    """Parts of a tensor keep their distance from its start; all else stays."""
    table, x = torch.zeros(64, dtype=torch.int32), torch.zeros(8, 16)
    again = noted(x, 5, table[16:], Box(x, [8, 16]), None, tensors=[x, table])
    others = torch.zeros(8, 16), torch.zeros(64, dtype=torch.int32)
    stream, (first, five, part, box, nothing) = again(others)

    assert (stream, five, nothing) == (7, 5, None)
    assert first == others[0].data_ptr()
    assert part == others[1].data_ptr() + 64
    assert box.base.data_ptr() == others[0].data_ptr()


def test_calls_whose_tensors_are_not_aligned_are_not_served():
    """Kernels were compiled for addresses that 16 divides, but for the first, loose ones."""
    x = torch.zeros(64)
    again = noted(x, tensors=[x])

    assert again([torch.zeros(65)[1:]]) is None
    assert again([torch.zeros(65)[1:]], loose=1) is not None


@pytest.mark.parametrize("by_address", [True, False])
def test_what_no_tensor_of_the_call_holds_is_not_written_down(by_address):
    """Nor what two of them hold."""
    x, other = torch.zeros(64), torch.zeros(64)
    with pytest.raises(NotRecordable, match="0 tensors"):
        noted(other, tensors=[x], by_address=by_address)
    with pytest.raises(NotRecordable, match="2 tensors"):
        noted(x, tensors=[x, x], by_address=by_address)


def test_products_are_written_down_and_new_tensors_are_not_forgotten():
    """torch's operators that write run again on views alike; one that makes a tensor forbids it."""
    left, right, out = torch.randn(4, 6), torch.randn(8, 5), torch.zeros(4, 5)
    recording = Recording()
    with recording.on():
        made = recording.note_new(lambda: torch.zeros(6, 5))
        made.copy_(right[2:])
        torch.mm(left, made, out=out)
    assert tape.started is None
    recipe = recording.recipe([left, right, out])

    others = torch.randn(4, 6), torch.randn(8, 5), torch.zeros(4, 5)
    assert recipe.serve(list(others), lambda *shape, dtype: torch.empty(shape, dtype=dtype), 0, 0)
    assert torch.equal(others[2], others[0] @ others[1][2:])

    with recording.on():
        torch.add(left, 1)
    with pytest.raises(NotRecordable, match="add"):
        recording.recipe([left, right, out])
