"""`torch.compile(backend="tlora-fx", options={"passes": ["own-lora"]})` of a PEFT model."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tlora_fx_own_kernel import fused_lora

CONFIG = transformers.LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture
def model():
    """A small Llama with LoRA on two linears; no B is zero."""
    torch.manual_seed(0)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    made = get_peft_model(transformers.LlamaForCausalLM(CONFIG), lora)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def step(model, run, ids):
    """Loss and gradients."""
    model.zero_grad()
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def test_losses_and_gradients_are_those_of_the_model(model, monkeypatch):
    """At two lengths, and every branch is served by the operator."""
    served = []
    plain = fused_lora._branch
    monkeypatch.setattr(fused_lora, "_branch", lambda *given: served.append(1) or plain(*given))
    compiled = torch.compile(
        model, backend="tlora-fx", options={"passes": ["own-lora"], "strict": True}
    )

    for width in (7, 12):
        ids = torch.randint(0, 61, (2, width))
        expected, found = step(model, model, ids), step(model, compiled, ids)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, rtol=2e-5, atol=2e-6)
    assert len(served) == 2 * 4 * 3
