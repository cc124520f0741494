"""What torch.compile may hand to the backend, and what it is told otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.backend.models import Lowering, net
from tests.models import error_of
from tlora_fx.backend import Options, read_options
from tlora_fx.errors import BackendOptionError, BackendUnsupported


def test_no_options_are_the_defaults():
    """Not strict, adapters in their own dtype, Inductor as it is set."""
    assert read_options(None, None) == Options(strict=False, compute="float32", inductor={})


def test_a_mode_is_inductors():
    """A mode of torch.compile becomes the options that Inductor knows it by."""
    assert read_options("max-autotune-no-cudagraphs", None).inductor["max_autotune"] is True


def test_inductors_options_are_handed_on():
    """What is no option of ours and one of Inductor's goes to Inductor, dashes or not."""
    found = read_options(None, {"strict": True, "max-autotune": True})

    assert found == Options(strict=True, inductor={"max_autotune": True})


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (None, {"strickt": True}, "nearest  strict"),
        (None, {"max_autotun": True}, "nearest  max_autotune"),
        (None, {"strict": "yes"}, "expected  True or False"),
        (None, {"compute": "bfloat16"}, "expected  float32 or base"),
        (None, {"max_autotune": "much"}, "expected  bool"),
        ("max-autotun", None, "nearest  max-autotune"),
    ],
    ids=["own", "inductor", "strict", "compute", "type", "mode"],
)
def test_wrong_options_are_refused(mode, options, expected):
    """An unknown name gets the nearest one, a wrong value what is allowed."""
    assert expected in error_of(lambda: read_options(mode, options), BackendOptionError)


def test_strict_raises_where_a_branch_is_left():
    """With `strict` torch.compile fails with the reason inside its own error."""
    compiled = Lowering({"strict": True}).compile(net(lora_bias=True))

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.randn(2, 12))

    assert isinstance(caught.value.inner_exception, BackendUnsupported)
    assert "its B has a bias (2: up, down)" in str(caught.value.inner_exception)


def test_torch_finds_the_backend_by_its_entry_point():
    """`backend="tlora-fx"` needs no import of tlora_fx."""
    from torch._dynamo.backends.registry import lookup_backend

    from tlora_fx.backend import compile_graph

    assert lookup_backend("tlora-fx") is compile_graph
