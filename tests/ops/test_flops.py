"""FLOP formulas against counts made by hand."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tlora_fx.ops import multi_lora_linear, packed_attention


def count(run):
    """The FLOPs of a call."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_adapters_cost_their_own_tokens_and_ranks(lora):
    """Forward: frozen product and both factors; backward: dx, and five low-rank products."""
    made = lora((3, 0, 4), (2, 8, 5), features=(6, 7))
    x, a, b = made.leaves()
    low_rank = 2 * (3 * 2 + 4 * 5)
    frozen = 2 * 7 * 6 * 7

    def forward():
        return multi_lora_linear(*made.arguments(x=x, a=a, b=b))

    assert count(forward) == frozen + low_rank * (6 + 7)
    assert count(lambda: forward().sum().backward()) == 2 * frozen + low_rank * (3 * 13 + 6)


def test_the_first_layer_counts_no_gradient_of_its_input(lora):
    """Without dx the backward has four low-rank products."""
    made = lora((3, 4), (2, 5), features=(6, 7))
    made.a.requires_grad_()
    made.b.requires_grad_()
    forward = count(lambda: multi_lora_linear(*made.arguments()))
    both = count(lambda: multi_lora_linear(*made.arguments()).sum().backward())

    assert both - forward == 2 * (3 * 2 + 4 * 5) * 2 * 13


def test_attention_counts_pairs_within_sequences(attention):
    """Two products forward, five backward, over the pairs of each sequence."""
    made = attention(((3, 5), (4,)), (4, 2), 8)
    leaves = dict(zip("qkv", made.leaves(), strict=True))
    product = 2 * 4 * (9 + 25 + 16) * 8

    assert count(lambda: packed_attention(*made.arguments())) == 2 * product
    run = count(lambda: packed_attention(*made.arguments(**leaves))[0].sum().backward())
    assert run == 7 * product


def test_fake_tensors_count_equal_shares(lora):
    """Without values in the tables every job has the same share."""
    made = lora((4, 4), (3, 3), features=(6, 7))
    real = count(lambda: multi_lora_linear(*made.arguments()))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(t) if torch.is_tensor(t) else t for t in made.arguments()]

        assert count(lambda: multi_lora_linear(*fake)) == real
