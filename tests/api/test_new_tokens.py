"""A base that was resized for added tokens trains as by PEFT; one that was not is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.api.bases import ROWS, TOKENIZER
from tlora_fx import Job, train
from tlora_fx.errors import DataDoesNotFit
from tlora_fx.runtime.verification.verify import bounds_of, verify

ADDED = ["<think>", "</think>"]
THINKING = [
    {"prompt": f"{row['prompt']}<think>", "completion": f"</think>{row['completion']}"}
    for row in ROWS
]


def base_and_tokenizer(*, tied: bool):
    """A Llama with as many rows as the tokenizer had before tokens were added."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    tokenizer.add_tokens(ADDED)
    return transformers.LlamaForCausalLM(config).double(), tokenizer


@pytest.mark.parametrize("trained", ["trainable_token_indices", "modules_to_save"])
@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_train_as_by_peft(tied, trained):
    """The new rows alone, or embedding and head whole; in one tensor or in two."""
    model, tokenizer = base_and_tokenizer(tied=tied)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = tokenizer.convert_tokens_to_ids(ADDED)
    wanted = {"trainable_token_indices": ids, "modules_to_save": ["embed_tokens", "lm_head"]}
    lora = {"r": 4, "target_modules": ["q_proj"], trained: wanted[trained]}
    job = Job(
        "a", base=model, tokenizer=tokenizer, lora=lora, data=THINKING, max_steps=2,
        per_device_train_batch_size=4, learning_rate=1e-2,
    )  # fmt: skip
    (row,) = verify([job], 2, device="cpu")

    assert row.within(bounds_of("float64", "cpu")), row


def test_tokens_without_a_row_are_refused(tmp_path):
    """The help says how a base gets rows."""
    model, tokenizer = base_and_tokenizer(tied=True)
    job = Job("a", base=model, tokenizer=tokenizer, lora=4, data=THINKING, max_steps=1)
    with pytest.raises(DataDoesNotFit, match="resize_token_embeddings"):
        train(job, output=tmp_path / "run", device="cpu", verbose=False)
