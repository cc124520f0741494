"""Text that jobs' adapters generate, on a base that is in memory once.

transformers generates, with its KV cache, and PEFT adapts: several adapters in one batch where it
can mix them, else one after the other.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import GenerationError, errors_as
from tlora_fx.model.backbone import (
    Backbone,
    build_skeleton,
    has_sdpa,
    load_backbone,
    longest_sequence,
)
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import planner_of
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    canonical_names,
    own_copy,
    read_adapter,
)
from tlora_fx.runtime.adapters.quantised import hold_parts, modules_copied, trained_base
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.chats.renderer import template_of
from tlora_fx.runtime.data.layout import CHATS
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.job_run import JobRun, SampleReport, described
from tlora_fx.runtime.merge import job_of
from tlora_fx.tracing.adapters import written_config

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedTokenizerBase

#: One or more messages as chat templates take them: role and content.
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of sampling tokens.

    max_new_tokens   at most; fewer where the base has no more positions
    temperature      0: the most likely token each time, as generate(do_sample=False)
    streamer         of transformers: hears tokens as they come; for one prompt alone
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    streamer: Any = None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter as PEFT has it: its config, and its tensors by the names of its files."""

    config: PeftConfig
    tensors: Mapping[str, Tensor]

    @property
    def can_be_mixed(self) -> bool:
        """Whether PEFT can apply it to some lines of a batch alone."""
        from peft import LoraConfig, PeftType

        config = self.config
        return (
            isinstance(config, LoraConfig)
            and config.peft_type == PeftType.LORA  # AdaLoRA's config is a LoraConfig too.
            and config.bias == "none"
            and not (config.use_dora or config.modules_to_save or config.trainable_token_indices)
            and not config.target_parameters
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt for an adapter, as token ids."""

    adapter: str
    ids: Sequence[int]


@dataclass
class AdapterGenerator:
    """A base and adapters by job name, ready to answer.

    base      base model of transformers, with its weights; it is not changed
    formats   of the data of each, by job name, as of `DataReport`
    """

    base: nn.Module
    tokenizer: PreTrainedTokenizerBase
    adapters: Mapping[str, AdapterWeights]
    formats: Mapping[str, str] = field(default_factory=dict)
    _adapted: dict[tuple[str, ...], PeftModel] = field(default_factory=dict)

    @classmethod
    def of_folders(cls, folders: Mapping[str, Path], device: torch.device | str) -> Self:
        """Generator from the adapter folders of a run, by job name, whose base is loaded anew.

        raises    AdapterFolderError, BaseNotLoadable, TokenizerNotLoadable, RunFolderError;
                  GenerationError where they have several bases, or a classifier
        """
        jobs = {name: job_of(folder) for name, folder in folders.items()}
        first, *others = jobs.values()
        spec = first.base
        if spec.is_classifier:
            raise GenerationError(
                "the base of this run classifies, and writes no text",
                job=first.name,
                help="load the job's folder with PEFT, or merge it, and call the model",
            )
        apart = next((job.name for job in others if job.base != spec), None)
        if apart is not None:
            raise GenerationError(
                "jobs of one call need one base",
                expected=f"that of '{first.name}', {spec.model or spec.config}",
                job=apart,
                help="name jobs of one base, by --job",
            )
        beside = (at for at in folders.values() if (at / "tokenizer_config.json").is_file())
        saved = next(beside, None)
        if saved is not None:
            spec = spec.model_copy(update={"tokenizer": str(saved)})
        tokenizer = load_tokenizer(spec)
        backbone = load_backbone(spec)
        adapters = {
            name: AdapterWeights(written_config(jobs[name], backbone), read_adapter(folder).tensors)
            for name, folder in folders.items()
        }
        formats = {name: str(job.data.format) for name, job in jobs.items()}
        base = trained_base([*jobs.values()], device=device)
        return cls(base.eval(), tokenizer, adapters, formats)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Tokens of a text as it is, or of messages by the chat template, with a turn begun.

        raises    GenerationError where there is no chat template, or it refuses the messages
        """
        if isinstance(prompt, str):
            ids: list[int] = list(self.tokenizer(prompt).input_ids)
            bos, written = self.tokenizer.bos_token_id, self.tokenizer.bos_token
            # A text that begins with the token itself gets no second one, as in training.
            if bos is not None and ids[:2] == [bos, bos] and prompt.startswith(str(written)):
                ids = ids[1:]
            # What the tokenizer puts behind a text ends it, and nothing would be said.
            return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        if not template_of(self.tokenizer):
            raise GenerationError(
                "the tokenizer has no chat template",
                help="ask with a text as it is: tlora-fx generate --no-chat --prompt TEXT",
            )
        rows = [dict(message) for message in prompt]
        with errors_as(
            GenerationError, "the chat template refuses the messages", Exception, named=True,
            help="give them as the template wants them, or ask with a text as it is",
        ):  # fmt: skip
            told: Any = self.tokenizer.apply_chat_template(
                rows, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        return list(told["input_ids"])

    def ask(self, name: str, text: str, *, chat: bool | None = None) -> Prompt:
        """A question as the job's data have them: of conversations, what the user says first.

        chat     by the chat template, or not; None: as the data
        raises   GenerationError
        """
        format = self.formats.get(name, "")
        if chat is None:
            chat = format in CHATS or (format == "alpaca" and bool(template_of(self.tokenizer)))
        if chat:
            return Prompt(name, self.encode([{"role": "user", "content": text}]))
        # As `TextEncoder` has the instruction without a template.
        return Prompt(name, self.encode(f"{text}\n\n" if format == "alpaca" else text))

    def answers(
        self, asked: Sequence[Prompt], sampling: SamplingOptions = SamplingOptions()
    ) -> list[str]:
        """Answer of each adapter, without the question and without special tokens.

        Questions to adapters that PEFT can mix are one batch, of those that may have answers of one
        length: a long question does not shorten the answers to others.

        raises    GenerationError
        """
        allowed = [self.allowed_tokens(each, sampling.max_new_tokens) for each in asked]
        said: dict[int, str] = {}
        for names in self._batches({question.adapter for question in asked}):
            model = self._adapted_by(names)
            for most in sorted(set(allowed)):
                places = [
                    at
                    for at, question in enumerate(asked)
                    if question.adapter in names and allowed[at] == most
                ]
                if places:
                    own = replace(sampling, max_new_tokens=most)
                    texts = self._generate(model, names, [asked[at] for at in places], own)
                    said |= dict(zip(places, texts, strict=True))
        return [said[at] for at in range(len(asked))]

    def _batches(self, names: set[str]) -> Iterator[tuple[str, ...]]:
        asked = sorted(names)
        mixed = tuple(name for name in asked if self.adapters[name].can_be_mixed)
        if mixed:
            yield mixed
        yield from ((name,) for name in asked if name not in mixed)

    def _adapted_by(self, names: tuple[str, ...]) -> PeftModel:
        """The base under some adapters, which are named by their place: PEFT allows no dots."""
        from peft import PeftModel, set_peft_model_state_dict

        if names in self._adapted:
            return self._adapted[names]
        made = own_copy(self.base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT asks transformers for what it will drop
            first, *others = names
            model = PeftModel(made, self._config(first), "0", low_cpu_mem_usage=True)
            for place, name in enumerate(others, start=1):
                model.add_adapter(str(place), self._config(name), low_cpu_mem_usage=True)
        device = next(self.base.parameters()).device
        for place, name in enumerate(names):
            own = {key: each.to(device) for key, each in self.adapters[name].tensors.items()}
            set_peft_model_state_dict(model, own, str(place), low_cpu_mem_usage=True)
        self._adapted[names] = model.eval()
        return self._adapted[names]

    def _config(self, name: str) -> PeftConfig:
        config = copy.deepcopy(self.adapters[name].config)
        config.inference_mode = True
        return config

    def _generate(
        self,
        model: PeftModel,
        names: Sequence[str],
        asked: Sequence[Prompt],
        sampling: SamplingOptions,
    ) -> list[str]:
        device = next(self.base.parameters()).device
        ids, attended = _padded([question.ids for question in asked], _pad_token(self.tokenizer))
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature:
            options["temperature"] = sampling.temperature
        if sampling.streamer is not None:
            options["streamer"] = sampling.streamer
        if len(names) > 1:
            options["adapter_names"] = [str(names.index(each.adapter)) for each in asked]
        generate: Any = model.generate
        with torch.no_grad():
            written = generate(
                input_ids=ids.to(device),
                attention_mask=attended.to(device),
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=_pad_token(self.tokenizer),
                use_cache=True,
                **options,
            )
        new = written[:, ids.shape[1] :]
        decoded = (self.tokenizer.decode(row, skip_special_tokens=True) for row in new.tolist())
        return [str(text) for text in decoded]

    def allowed_tokens(self, question: Prompt, wanted: int) -> int:
        """Longest answer to a question, in tokens, and at most `wanted`.

        raises    GenerationError where there can be none
        """
        positions, tokens = longest_sequence(self.base), len(question.ids)
        if not tokens:
            raise GenerationError("a prompt has no tokens", help="write something to go on from")
        allowed = wanted if positions is None else min(wanted, positions - tokens)
        if allowed < 1:
            raise GenerationError(
                "a prompt leaves no room for an answer",
                expected=f"fewer than {positions} tokens",
                found=tokens,
                help="shorten it",
            )
        return allowed


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Nothing reads it."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in known if token is not None))


def _padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, int64 [B, S], padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(each)) + list(each) for each in prompts]
    attended = [[0] * (width - len(each)) + [1] * len(each) for each in prompts]
    return torch.tensor(ids), torch.tensor(attended)


# While jobs train.

#: Of a prompt that is not asked, so much is told.
PROMPT_CHARACTERS = 40


def resident_base(model: SuperModel) -> nn.Module:
    """The base as transformers runs it, over the tensors of a model that trains; none is copied.

    model    has its weights, whole
    raises   GenerationError where the base is no model of transformers, or a pass quantised it
    """
    backbone = model.backbone
    if backbone.spec.module is not None:
        raise GenerationError(
            "the base is an nn.Module, which does not generate", help="generate with it yourself"
        )
    base: Any = build_skeleton(backbone.spec)
    canonical, form = canonical_names(backbone), backbone.spec.quantize
    copied = modules_copied(model.jobs)
    for path, module in list(base.named_modules()):
        stem = f"{path}." if path else ""
        for name in [name for name, held in module._parameters.items() if held is not None]:
            own = canonical[f"{stem}{name}"]
            if form is not None and (parts := model.stored_parts(own)):
                hold_parts(module, name, form, parts, restored=path.rpartition(".")[2] in copied)
                continue
            tensor = _resident(model, own)
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    device = next(base.parameters()).device
    for module in base.modules():
        for name in [name for name, held in module._buffers.items() if held is not None]:
            module._buffers[name] = module._buffers[name].to(device)
    if has_sdpa(base):
        base.set_attn_implementation("sdpa")
    base.generation_config = generation_config(backbone) or base.generation_config
    return base.eval()  # type: ignore[no-any-return]


def generation_config(backbone: Backbone) -> Any:
    """How a base says that it generates, such as which tokens end a text; None: it does not."""
    # A folder or hub id may say more than a config.
    if backbone.spec.model is not None:
        from transformers import GenerationConfig

        with suppress(OSError):
            return GenerationConfig.from_pretrained(backbone.spec.model)
    return getattr(backbone.model, "generation_config", None)


def _resident(model: SuperModel, name: str) -> Tensor:
    if not model.has_base_tensor(name):
        raise GenerationError(
            "the base is not in memory as it is",
            tensor=name,
            found="quantised, or in another process",
            help="use tlora-fx generate after training",
        )
    return model.base_tensor_or_value(name).detach()


class PromptAnswerer:
    """Lets jobs answer their `sample_prompts` while they train, those of one step in one batch.

    plan     under one that holds the base in pieces, nobody is asked
    model    has its weights
    """

    def __init__(self, plan: Plan, model: SuperModel) -> None:
        self.plan, self.model = plan, model
        self._told: set[str] = set()

    def warn(self, jobs: Iterable[Job], callback: TrainerCallback) -> None:
        """Say before training that the jobs' `sample_prompts` stay without an answer, once."""
        refusal = self._refusal()
        if refusal is not None and any(job.sample_prompts for job in jobs):
            self._warn_once(f"no samples: {described(refusal)}", callback)

    def _refusal(self) -> GenerationError | None:
        if planner_of(self.plan).holds_whole_base(self.plan):
            return None
        return GenerationError(
            f"the plan '{self.plan.planner}' holds the base in pieces",
            help="use tlora-fx generate after training",
        )

    def _warn_once(self, text: str, callback: TrainerCallback) -> None:
        if text not in self._told:
            self._told.add(text)
            callback.warned(text)

    def tell(self, runs: Sequence[JobRun], callback: TrainerCallback) -> bool:
        """Put what jobs say into their metrics, and tell a callback; False where that failed.

        A prompt that cannot be asked costs its own answer alone. A reason is told once.
        """
        callback.evaluating()
        by_name = {run.job.name: run for run in runs}
        try:
            for report in self.draw(runs, lambda text: self._warn_once(text, callback)):
                by_name[report.job].metrics.append_samples(report.step, report.texts)
                callback.sampled(report)
        except Exception as error:  # noqa: BLE001  (such as no memory for it: training goes on)
            failure = f"no samples: {described(error)}"
        else:
            return True
        self._warn_once(failure, callback)
        return False

    def draw(self, runs: Sequence[JobRun], warn: Callable[[str], None]) -> list[SampleReport]:
        """Generate what jobs say now; nothing that trains changes.

        warn     hears of each prompt that cannot be asked, with the reason
        raises   GenerationError
        """
        if (refusal := self._refusal()) is not None:
            raise refusal
        tokenizer = next((run.data.tokenizer for run in runs if run.data.tokenizer), None)
        if tokenizer is None:
            help = "name the data by the jobs' `data`, not by Trainer(data=...)"
            raise GenerationError("there is no tokenizer to sample with", help=help)
        adapters = {
            run.job.name: AdapterWeights(
                written_config(run.job, run.backbone), adapter_tensors(run.parameters)
            )
            for run in runs
        }
        formats = {run.job.name: run.data.report.format for run in runs}
        generator = AdapterGenerator(resident_base(self.model), tokenizer, adapters, formats)
        reports: list[SampleReport] = []
        # A batch goes on until its longest answer ends.
        for most in sorted({run.job.sample_max_new_tokens for run in runs}):
            asked = [run for run in runs if run.job.sample_max_new_tokens == most]
            questions = {run.index: _askable(generator, run, most, warn) for run in asked}
            every = [question for own in questions.values() for _, question in own]
            said = iter(generator.answers(every, SamplingOptions(most)))
            for run in asked:
                # One that is left out has no report.
                texts = tuple((prompt, next(said)) for prompt, _ in questions[run.index])
                reports += [SampleReport(run.job.name, run.step, texts)] if texts else []
        return reports


def _askable(
    generator: AdapterGenerator, run: JobRun, most: int, warn: Callable[[str], None]
) -> list[tuple[str, Prompt]]:
    """A job's prompts that can have answers of `most` tokens or fewer, as text and as asked."""
    askable = []
    for prompt in run.job.sample_prompts:
        try:
            question = generator.ask(run.job.name, prompt)
            generator.allowed_tokens(question, most)
        except GenerationError as error:
            warn(f"no answer of job '{run.job.name}' to {_short(prompt)!r}: {described(error)}")
        else:
            askable.append((prompt, question))
    return askable


def _short(prompt: str) -> str:
    """The start of a prompt, on one line; it may be without spaces, as Chinese is."""
    text = " ".join(prompt.split())
    return text if len(text) <= PROMPT_CHARACTERS else text[: PROMPT_CHARACTERS - 1] + "…"
