"""The tokenizer of a base, which needs nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_fx.config.base_files import refuse_remote_code, require_tokenizer_files
from tlora_fx.config.hub import is_hub_id, why_offline
from tlora_fx.config.job import BaseSpec
from tlora_fx.config.objects import name_of
from tlora_fx.errors import TokenizerNotLoadable
from tlora_fx.host.phases import phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(spec: BaseSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of a base.

    raises    TokenizerNotLoadable; BaseFileDamaged; RemoteCodeRefused where it needs code of its
              own that the job file does not trust
    """
    if spec.tokenizer_object is not None:
        return spec.tokenizer_object  # type: ignore[no-any-return]
    with phase("imports"):
        from transformers import AutoTokenizer

    require_tokenizer_files(spec)

    source: Any = spec.tokenizer or spec.model or name_of(spec.module)
    if source is None and spec.config is not None:
        source = spec.config if spec.config.is_dir() else spec.config.parent
    offline = why_offline() if is_hub_id(source) else ""
    try:
        if source is None:
            raise ValueError("the base is an nn.Module that does not say where its tokenizer is")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:  # whatever a library raises of a file that it did not expect
        refuse_remote_code(spec, error)
        raise TokenizerNotLoadable(
            "the base's tokenizer cannot be loaded",
            tokenizer=source,
            found=f"not cached, and the hub is not reached ({offline})"
            if offline
            else _none_in_the_folder(source) or error,
            help="name a folder that holds it, or mend the connection"
            if offline
            else "set base.tokenizer to a hub id or a folder with tokenizer.json, "
            "or give Job(tokenizer=...) or Trainer(data=...)",
        ) from error
    return tokenizer


#: What files of tokenizers are called, vocabularies and merges among them.
_FILES = ("*token*", "*tekken*", "*vocab*", "*merges*", "*.model")


def _none_in_the_folder(source: object) -> str:
    """Why a folder gives no tokenizer, where it has no file of one; else empty."""
    folder = Path(str(source))
    if not folder.is_dir() or any(any(folder.glob(name)) for name in _FILES):
        return ""
    return "no file of a tokenizer in the folder"
