"""What must hold between jobs, data and base before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import DataDoesNotFit, TokenizerNotLoadable
from tlora_fx.model.backbone import Backbone
from tlora_fx.runtime.data import JobData, load_job_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_all_data(jobs: Sequence[Job]) -> dict[str, JobData]:
    """Every job's samples, by job name.

    raises    DataError, naming file, line and job; TokenizerNotLoadable
    """
    tokenizer = load_tokenizer(jobs[0].base)
    return {job.name: load_job_data(job, tokenizer) for job in jobs}


def load_tokenizer(spec: BaseSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of a base.

    raises    TokenizerNotLoadable
    """
    from transformers import AutoTokenizer

    source: Any = spec.tokenizer or spec.model
    if source is None and spec.config is not None:
        source = spec.config if spec.config.is_dir() else spec.config.parent
    try:
        if source is None:
            raise ValueError("the base is an nn.Module, which has no tokenizer")
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerNotLoadable(
            "the base's tokenizer cannot be loaded",
            tokenizer=source,
            found=error,
            help="set base.tokenizer to a hub id or a folder with tokenizer.json, "
            "or give Trainer(data=...)",
        ) from error
    return found


def check_fits(backbone: Backbone, data: Mapping[str, JobData]) -> None:
    """Whether every token has an embedding and every sequence a position.

    raises    DataDoesNotFit, naming the job
    """
    vocabulary = getattr(backbone.config, "vocab_size", None)
    positions = getattr(backbone.config, "max_position_embeddings", None)
    for name, own in data.items():
        longest = max(len(sample.input_ids) for sample in own.samples)
        largest = max(max(sample.input_ids) for sample in own.samples)
        if vocabulary is not None and largest >= vocabulary:
            raise DataDoesNotFit(
                f"job '{name}' has tokens that the base does not know",
                job=name,
                expected=f"token ids below {vocabulary}",
                found=largest,
                help="give the tokenizer that belongs to the base",
            )
        if positions is not None and longest > positions:
            raise DataDoesNotFit(
                f"job '{name}' has sequences that are too long for the base",
                job=name,
                expected=f"at most {positions} tokens",
                found=longest,
                help=f"set max_length of the job to {positions} or less",
            )
