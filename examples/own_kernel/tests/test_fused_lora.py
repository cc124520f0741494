"""`own_kernel::fused_lora` by all checks of `tlora_fx.testing`, with PyTorch and by its kernels."""

import pytest
import torch
from tlora_fx_own_kernel.fused_lora import FusedLora

from tlora_fx.testing import operator_tests

test_in_pytorch = operator_tests(FusedLora)
test_by_kernels = pytest.mark.usefixtures("_kernels")(operator_tests(FusedLora))
test_on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(
    operator_tests(FusedLora, device="cuda", dtype=torch.bfloat16)
)


@pytest.fixture
def _kernels(monkeypatch, tmp_path):
    """Kernels on the CPU, by Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
