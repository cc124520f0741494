"""A small base with random weights, so that the service can be tried without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "tlora-fx/small"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_small_base(folder: Path) -> Path:
    """Write a Llama's config and a tokenizer of bytes into a folder, where they are not yet."""
    if (folder / "config.json").is_file():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = ("<bos>", "<eos>", "<pad>")
    vocabulary = {text: number for number, text in enumerate([*ends, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = ends
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad,
        chat_template=_TEMPLATE, model_max_length=2048,
    ).save_pretrained(folder)  # fmt: skip
    LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder
