"""Task that a base was made for, read from its config.json alone: before torch is imported.

A job trains a causal language model, or a classifier of sequences where the base's task says so. Of
other kinds of models transformers often has a causal class too, with other layers or a head of
random numbers; training that would waste hours in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.config.base_files import config_file
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.errors import BaseRefused
from tlora_fx.host.formats import read_object

#: Endings of the class in config.json's `architectures`, and what such a model is.
CAUSAL = ("ForCausalLM", "LMHeadModel")
_KINDS: Mapping[str, str] = {
    "ForSequenceClassification": "a classifier of sequences",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a model that chooses among answers",
    "ForNextSentencePrediction": "an encoder",
    "ForMaskedLM": "an encoder",
    "ForPreTraining": "an encoder",
    "ForCTC": "a model of speech",
    "ForAudioClassification": "a model of speech",
    "ForImageClassification": "a model of images",
}
#: The kinds of which transformers has a class that classifies sequences.
CLASSIFY = ("a classifier of sequences", "an encoder")
#: model_type of encoders: a config that names no class is judged by it.
ENCODERS = frozenset({
    "albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie", "esm", "flaubert", "fnet", "funnel", "ibert", "layoutlm",
    "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "nystromformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert",
    "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
})  # fmt: skip


def require_task(config: Mapping[str, Any], spec: BaseSpec) -> None:
    """Refuse a base that is not made for its task.

    config    what its config.json holds
    raises    BaseRefused
    """
    source = spec.model or (str(spec.config) if spec.config else type(spec.module).__name__)
    if spec.is_classifier:
        _require_classifying(config, source)
        return
    named = [str(name) for name in config.get("architectures") or ()]
    remote = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote or any(name.endswith(CAUSAL) for name in named):
        return
    kind = _kind(config, named)
    if kind:
        raise BaseRefused(
            f"tlora-fx trains causal language models, and this base is {kind}",
            base=source,
            found=", ".join([*named, f"model_type '{config.get('model_type', '')}'"]),
            help="name a base whose config.json has a class ...ForCausalLM under architectures"
            + (
                "; to classify sequences by it: task: SEQ_CLS and labels under 'base'"
                if kind in CLASSIFY
                else "; train this one with PEFT and transformers' Trainer"
            ),
        )


def pools_first(config: Mapping[str, Any]) -> bool:
    """Whether a classifier of sequences reads the first token, as encoders do, not the last one."""
    return config.get("model_type") in ENCODERS


def sees_images(config: Mapping[str, Any]) -> bool:
    """Whether a base reads images besides text, and has a class of its own for both."""
    named = map(str, config.get("architectures") or ())
    return "vision_config" in config and any(n.endswith("ConditionalGeneration") for n in named)


def _require_classifying(config: Mapping[str, Any], source: str) -> None:
    if config.get("is_encoder_decoder"):
        raise BaseRefused(
            "tlora-fx classifies by decoders and encoders, and this base is an encoder-decoder",
            base=source,
            found=f"model_type '{config.get('model_type', '')}'",
            help="name a decoder or an encoder; train this one with PEFT and transformers' Trainer",
        )


def _kind(config: Mapping[str, Any], named: list[str]) -> str:
    """What a base is that is no causal language model; nothing where that is not known."""
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder"
    kinds = [kind for ending, kind in _KINDS.items() if any(n.endswith(ending) for n in named)]
    if not kinds and not named and config.get("model_type") in ENCODERS:
        kinds = ["an encoder"]
    if kinds == ["an encoder"] and config.get("is_decoder"):
        return ""
    return kinds[0] if kinds else ""


def read_base_config(base: BaseSpec) -> dict[str, Any] | None:
    """A base's config.json, None where it is not on this machine or no JSON object."""
    path = config_file(base)
    return None if path is None else read_object(path)
