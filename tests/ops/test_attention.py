"""`packed_attention` against one dense score matrix in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import AttentionShapeError, MaskKeyError, SegmentError
from tlora_fx.ops import attention as module
from tlora_fx.ops import packed_attention

RULES = [
    {},
    {"causal": False},
    {"window": 3},
    {"window": 1},
    {"causal": False, "window": 2},
    {"softcap": 0.7},
    {"sinks": True},
    {"dropout": 0.3},
    {"window": 3, "softcap": 1.5, "sinks": True, "dropout": 0.2},
]
MIX = ((3, 5), (), (1, 0, 7))


def results(made):
    """The operator's out, lse and gradients, and the reference's."""
    leaves = made.leaves()
    out, lse = packed_attention(*made.arguments(**dict(zip("qkv", leaves, strict=True))))
    expected, expected_lse = made.reference(*leaves)
    dout = torch.randn(expected.shape, dtype=torch.float64, device=out.device)
    found = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    wanted = torch.autograd.grad(expected, leaves, dout)
    return (out, lse.detach(), *found), (expected, expected_lse.detach(), *wanted)


def assert_equal(pairs, **bound):
    """Results equal the reference's one by one."""
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected, check_dtype=False, **bound)


@pytest.fixture(params=["flash where it fits", "written out"])
def path(request, monkeypatch):
    """Both ways of the CPU: torch's kernel for plain sequences, and the explicit one."""
    if request.param == "written out":
        monkeypatch.setattr(module, "flash_fits_sequence", lambda *_: False)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_every_rule_equals_dense_attention(attention, path, rule, heads):
    """out, lse and gradients agree for each rule, with and without grouped heads."""
    assert_equal(results(attention(MIX, heads, **rule)), rtol=1e-11, atol=1e-11)


@given(
    jobs=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4).filter(
        lambda jobs: any(map(any, jobs))
    ),
    window=st.sampled_from([-1, 1, 2, 5, 100]),
    causal=st.booleans(),
)
def test_any_cut_equals_dense_attention(attention, jobs, window, causal):
    """Random sequences, empty ones among them, in random jobs."""
    made = attention(tuple(map(tuple, jobs)), (2, 1), 4, window=window, causal=causal)

    assert_equal(results(made), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_pass_gradcheck(attention, path, rule):
    """Numerical differences agree with the backward operator, sinks included."""
    made = attention(((2, 3),), (2, 1), 3, **rule)
    names = ("q", "k", "v", "sinks") if made.sinks is not None else ("q", "k", "v")
    leaves = [getattr(made, name).requires_grad_() for name in names]

    def run(*leaves):
        return packed_attention(*made.arguments(**dict(zip(names, leaves, strict=True))))[0]

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_query_blocks_do_not_show(attention, monkeypatch, rule):
    """Long sequences, taken in blocks of 16 queries, equal dense attention."""
    monkeypatch.setattr(module, "_CPU_SCORES", 1)
    monkeypatch.setattr(module, "flash_fits_sequence", lambda *_: False)
    made = attention(((40,), (7, 17)), (2, 1), 4, **rule | {"window": 20})

    assert_equal(results(made), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [{}, {"window": 9}, {"softcap": 5.0, "sinks": True}], ids=str)
def test_smaller_types_stay_close_to_float64(attention, path, dtype, rule):
    """Errors stay within a few roundings; lse is float32."""
    made = attention(((30, 1), (45,)), (4, 2), 16, dtype=dtype, **rule)
    (out, lse, *grads), (*wanted,) = results(made)

    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    for found, expected in zip((out, lse, *grads), wanted, strict=True):
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [(8, 4), (4, 8)])
def test_values_may_have_another_width(attention, width):
    """v's head size may differ from q's and k's."""
    made = attention(MIX, (4, 2), width[0])
    made.v = torch.randn(made.row.tokens, 2, width[1], dtype=torch.float64)

    assert_equal(results(made), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"dropout": 0.3}], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_a_nan_stays_in_its_job(attention, path, rule, where):
    """NaN in one job leaves its neighbours' outputs and gradients bitwise unchanged."""
    made = attention(((4, 3), (5,), (6,)), dtype=torch.float32, **rule)

    def run(poison):
        leaves = made.leaves()
        dout = torch.ones_like(made.q)
        target = dict(zip(("q", "k", "v", "dout"), (*leaves, dout), strict=True))[where]
        if poison:
            target.detach()[7:12] = float("nan")
        out, lse = packed_attention(*made.arguments(**dict(zip("qkv", leaves, strict=True))))
        parts = (out, lse.t(), *torch.autograd.grad(out, leaves, dout))
        return [torch.cat([part[:7], part[12:]]) for part in parts]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_job_is_bitwise_the_same_alone_and_moved(attention, path, rule):
    """A job's attention depends neither on its neighbours nor on its place in the row."""
    among = attention(((6, 2), (9, 4), (3,)), dtype=torch.float32, **rule)
    own = slice(8, 21)
    alone = attention(((9, 4),), dtype=torch.float32, **rule)
    alone.q, alone.k, alone.v, alone.sinks = among.q[own], among.k[own], among.v[own], among.sinks
    alone.row.keys = among.row.keys[1:2]

    for first, second in zip(
        packed_attention(*among.arguments()), packed_attention(*alone.arguments()), strict=True
    ):
        part = first[own] if first.dim() == 3 else first[:, own]
        assert torch.equal(part, second)


def test_token_indices_decide_the_mask(attention):
    """Dropped weights follow the tokens' indices in the job's step, in any order."""
    made = attention(((6,), (7,)), dropout=0.4)
    made.row.token_index = torch.randperm(40, dtype=torch.int32)[:13].view(1, 13)

    assert_equal(results(made), rtol=1e-11, atol=1e-11)


def test_strides_do_not_matter(attention, path):
    """Views of transposed tensors and an expanded gradient give what contiguous ones give."""
    made = attention(MIX)
    views = {
        name: getattr(made, name).permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
        for name in "qkv"
    }
    out, _ = packed_attention(*made.arguments(**views))
    expected = made.reference(*views.values())[0]

    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.sum(), tuple(views.values()))
    wanted = torch.autograd.grad(expected.sum(), tuple(views.values()))
    assert_equal((found, wanted), rtol=1e-11, atol=1e-11)


def test_an_empty_row_has_empty_results(attention):
    """No tokens, no sequences: nothing to do, nothing to fail."""
    made = attention(((0,),))

    assert_equal(results(made))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rule", [{}, RULES[-1]], ids=str)
def test_packed_attention_passes_opcheck(attention, rule, gradient):
    """Schema, fake, autograd registration and AOT dispatch hold."""
    made = attention(((3, 2), (4,)), dtype=torch.float32, **rule)
    leaves = {name: getattr(made, name).requires_grad_(gradient) for name in "qkv"}

    torch.library.opcheck(packed_attention, made.arguments(**leaves))


def test_the_backward_passes_opcheck(attention):
    """The backward operator stands on its own."""
    made = attention(((3, 2), (4,)), window=2)
    q, k, v, *tables = made.arguments()
    out, lse = packed_attention(q, k, v, *tables)
    op = torch.ops.tlora_fx.packed_attention_backward.default
    torch.library.opcheck(op, (torch.randn_like(out), q, k, v, out, lse, *tables))


def plain(*tensors):
    """Causal attention, computed on."""
    return packed_attention(*tensors, 0.4, True, -1, 0.0, None, 0.0)[0] * 2


def dropping(*tensors):
    """The same with a window and dropout."""
    return packed_attention(*tensors, 0.4, True, 5, 0.0, None, 0.2)[0] * 2


@pytest.mark.parametrize("function", [plain, dropping])
def test_other_rows_do_not_recompile(attention, compiles, function):
    """One compilation serves other lengths, cuts and numbers of sequences."""
    mixes = ((5, 6), (9,)), ((12,), (1, 2)), ((3, 3, 8), (4,))
    calls = [attention(jobs, (7, 7), 6).arguments()[:9] for jobs in mixes]

    assert compiles(function, calls) == 1


def test_gradients_pass_through_compiled_code(attention):
    """The backward runs through AOT autograd."""
    made = attention(MIX)
    leaves = made.leaves()

    def run(q, k, v):
        return packed_attention(*made.arguments(q=q, k=k, v=v))[0].square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)

    assert_equal((found, torch.autograd.grad(run(*leaves), leaves)))


def test_the_log_sum_exp_has_no_gradient(attention):
    """lse asks for none, so nothing can be trained through it by mistake."""
    made = attention(MIX)
    made.q.requires_grad_()
    out, lse = packed_attention(*made.arguments())

    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"window": 0}, AttentionShapeError),
        ({"softcap": -1.0}, AttentionShapeError),
        ({"scale": float("nan")}, AttentionShapeError),
        ({"dropout": 1.0}, MaskKeyError),
        ({"k": torch.randn(16, 3, 8).double()}, AttentionShapeError),
        ({"k": torch.randn(15, 2, 8).double()}, AttentionShapeError),
        ({"v": torch.randn(16, 2, 8)}, AttentionShapeError),
        ({"q": torch.randn(1, 16, 4, 8).double()}, AttentionShapeError),
        ({"sequences": (8, 7)}, AttentionShapeError),
        ({"sequences": (9, 7)}, SegmentError),
    ],
    ids=[
        "window 0",
        "negative soft cap",
        "scale nan",
        "dropout 1",
        "heads that do not divide",
        "fewer keys",
        "another dtype",
        "four dimensions",
        "sequences too short",
        "sequences across jobs",
    ],
)
def test_wrong_input_is_named(attention, change, error):
    """Numbers out of range, shapes that do not fit, and sequences across jobs are errors."""
    made = attention(((3, 5), (), (1, 7)))
    for name, value in change.items():
        setattr(made, name, value)
    with pytest.raises(error):
        packed_attention(*made.arguments())


def test_dropout_needs_a_site(attention):
    """Attention dropout without the site of its masks is refused."""
    made = attention(MIX, dropout=0.1)
    arguments = list(made.arguments())
    arguments[8] = None
    with pytest.raises(MaskKeyError, match="site"):
        packed_attention(*arguments)
