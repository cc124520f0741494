"""Options of a trainer of clients' models; without torch, for who starts one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tlora_fx.config.base_spec import BaseSpec, DtypeName
from tlora_fx.host.durable import replace_file

#: Of every model's adapter; clients do not say it.
ALPHA = 32


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a trainer of clients' models is made.

    folder      of the log, the small base, and versions
    base        hub id or folder; None: the small base
    dtype       of the base; None: float32 on the CPU, else bfloat16
    residents   models and versions that lie in the banks at a time
    max_rank    of a model at most, a multiple of 8
    compiled    layers are compiled by torch.compile, while cycles run
    """

    folder: Path
    base: str | None = None
    device: str = "cpu"
    dtype: DtypeName | None = None
    residents: int = 8
    max_rank: int = 64
    compiled: bool = False

    @property
    def base_name(self) -> str:
        """The base's name, as clients give it."""
        return self.base or SMALL

    @property
    def tokenizer(self) -> str:
        """Source from which clients load the tokenizer."""
        return self.base or str(self._small_folder)

    @property
    def _small_folder(self) -> Path:
        return self.folder.absolute() / "base"

    def spec(self) -> BaseSpec:
        """The base."""
        dtype: DtypeName = self.dtype or ("float32" if self.device == "cpu" else "bfloat16")
        if self.base is None:
            return BaseSpec(config=write_small_base(self._small_folder), dtype=dtype)
        return BaseSpec(model=self.base, dtype=dtype)


# A small base with random weights, so that the service can be tried without a download.

SMALL = "tlora-fx/small"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_small_base(folder: Path) -> Path:
    """Write a Llama's config and a tokenizer of bytes into a folder, where they are not yet.

    The config comes last and whole, so a folder of a killed process is written anew.
    """
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
    llama = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    with TemporaryDirectory() as written:
        llama.save_pretrained(written)
        replace_file(folder / "config.json", (Path(written) / "config.json").read_bytes())
    return folder
