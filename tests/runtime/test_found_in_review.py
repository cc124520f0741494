"""What a careful reader once found wrong: each stays mended."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from tests.models import OLD_TRANSFORMERS, Plain, hand_written
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseNotLoadable, JobsDiffer, ResumeMismatch, UnknownTarget
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.runtime.trainer import Trainer, TrainerCallback
from tlora_fx.runtime.verification.verify import bounds_of, verify


def train(jobs, folder, **options):
    model = compile(jobs)
    Trainer(model, output=folder, device="cpu", data=make_data(jobs), **options).run()
    return model


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="this OPT branches on random numbers")
def test_functional_dropouts_of_a_layer_draw_the_masks_of_the_oracle(tmp_path):
    """OPT calls F.dropout several times in a layer's own forward."""
    transformers.OPTConfig(
        vocab_size=53, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, layerdrop=0.0, dropout=0.1,
        attention_dropout=0.1, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    base = BaseSpec(config=tmp_path, dtype="float64", seed=1)
    jobs = [make_job(base, "a", seed=1), make_job(base, "b", seed=2)]

    found = list(verify(jobs, steps=2, device="cpu", data=make_data(jobs)))

    assert len(found) == 4
    assert all(row.within(bounds_of("float64", "cpu")) for row in found), found


class TwoDropouts(Plain):
    """One dropout that is called twice, and another whose name looks like its second call."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.drop, self.drop_1 = nn.Dropout(0.1), nn.Dropout(0.5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits without attention."""
        hidden = self.drop_1(self.drop(self.drop(self.embed(input_ids))))
        for layer in self.layers:
            hidden = hidden + layer.out(torch.tanh(hidden))
        return self.head(hidden)


def test_each_dropout_has_a_rate_and_a_site_of_its_own():
    """Three calls, three sites, and the rates 0.1, 0.1 and 0.5."""
    model = compile(hand_written(TwoDropouts(), "batch"))

    rates = [b for n, b in model.named_buffers() if "keyed" in n and n.endswith("rates")]
    sites = [b for n, b in model.named_buffers() if "keyed" in n and n.endswith("site")]
    assert sorted(float(rate[0]) for rate in rates) == [0.1, 0.1, 0.5]
    assert len({int(site) for site in sites}) == 3


def test_a_trained_copy_of_attention_leaves_the_row_without_harm(tmp_path):
    """A job that ends has an empty segment, through which its copy still runs."""
    base = tiny_base(tmp_path / "base")
    saved = {"modules_to_save": ["self_attn"], "target_modules": ["down_proj"]}
    jobs = [
        make_job(base, "a", seed=1, max_steps=1, lora=saved),
        make_job(base, "b", seed=2, max_steps=3),
    ]
    train(jobs, tmp_path / "run")

    assert [len(v) for v in losses_of(tmp_path / "run", jobs).values()] == [1, 3]


def test_a_trained_copy_has_the_buffers_of_its_module(tmp_path):
    """Gemma's embedding multiplies by a buffer, which PEFT copies and does not train."""
    transformers.Gemma2Config(
        vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    base = BaseSpec(config=tmp_path, dtype="float32", seed=1)
    saved = {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj"]}
    jobs = [make_job(base, "a", seed=1, lora=saved), make_job(base, "b", seed=2)]

    found = list(verify(jobs, steps=2, device="cpu", data=make_data(jobs)))

    assert {row.job for row in found} == {"a", "b"}
    assert all(row.within(bounds_of("float32", "cpu")) for row in found), found


def test_a_model_compiled_for_other_numbers_is_not_trained(tmp_path):
    """Jobs of the same names but another alpha are refused."""
    base = tiny_base(tmp_path)
    model = compile([make_job(base, "a", lora={"lora_alpha": 4})])

    with pytest.raises(ResumeMismatch, match="lora_alpha"):
        Trainer(model, [make_job(base, "a", lora={"lora_alpha": 64})])


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    """Nothing is drawn in place of what a base's files do not hold."""
    tiny_base(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec = BaseSpec(model=str(tmp_path), dtype="float32")

    with pytest.raises(BaseNotLoadable, match=r"lm_head\.weight"):
        base_tensors(load_backbone(spec))


def test_bfloat16_adapters_on_another_base_are_refused(tmp_path):
    """PEFT would store them in float32 without a word."""
    base = tiny_base(tmp_path, "float32")

    with pytest.raises(JobsDiffer, match="bfloat16"):
        compile([make_job(base, "a", adapter_dtype="bfloat16")])


@pytest.mark.parametrize("targets", ["*.q_proj", ["q_proj", "proj"]], ids=["regex", "tail"])
def test_targets_that_match_nothing_are_refused(tmp_path, targets):
    """A broken regex, and a name that is only the tail of another."""
    with pytest.raises(UnknownTarget):
        compile([make_job(tiny_base(tmp_path), "a", lora={"target_modules": targets})])


def test_resuming_before_the_first_checkpoint_starts_anew_and_says_so(tmp_path):
    """Metrics of the lost steps are dropped, not repeated."""
    heard = []

    class Stop(TrainerCallback):
        def stepped(self, report):
            if report.step == 2:
                raise RuntimeError("killed")

        def warned(self, text):
            heard.append(text)

    jobs = [make_job(tiny_base(tmp_path / "base"), "a")]
    train(jobs, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        train(jobs, tmp_path / "cut", callback=Stop())
    callback = Stop()
    callback.stepped = lambda report: None
    train(jobs, tmp_path / "cut", resume=True, callback=callback)

    assert "no checkpoint" in heard[0]
    assert losses_of(tmp_path / "cut", jobs) == losses_of(tmp_path / "whole", jobs)


def test_a_resumed_job_whose_steps_were_cut_is_done(tmp_path):
    """Lowering max_steps below what was done ends the job at once."""
    base = tiny_base(tmp_path / "base")
    train([make_job(base, "a", max_steps=4)], tmp_path / "run")
    train([make_job(base, "a", max_steps=2)], tmp_path / "run", resume=True)

    assert len(losses_of(tmp_path / "run", [make_job(base, "a")])["a"]) == 4
