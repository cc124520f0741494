"""`keep-attention`: what it keeps, and that numbers stay."""

from tlora_fx.compiler import DEFAULT_PIPELINE
from tlora_fx.inspect.joint import joint_text
from tlora_fx.testing import around, assert_equivalent

LITTLE = f"{DEFAULT_PIPELINE},recompute-layers{{budget=0.01}}"
ADDED = "keep-attention@after:recompute-layers"


def again(group):
    """The operators that are computed again."""
    lines = [line.split() for line in joint_text(group).splitlines()]
    return {words[2] for words in lines if words and words[0] == "again"}


def test_attention_is_kept_however_small_the_budget(jobs):
    """Without the pass this budget computes it again."""
    before, after = around(jobs, ADDED, LITTLE)

    assert "tlora_fx.packed_attention" in again(before)
    assert "tlora_fx.packed_attention" not in again(after)


def test_numbers_stay(jobs):
    """Losses and gradients are the same to the bit."""
    assert_equivalent(*around(jobs, ADDED, LITTLE), exact=True)
