"""Commands that clients write in JSON: each kind, its fields and their bounds.

Fields are those of the Tinker API. What is not known is refused, for it would change numbers
silently; a field that the service knows and does not do is refused by name.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tlora_fx.errors import CommandRefused
from tlora_fx.training.records import Kind

_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME = "letters, digits and . _ - only, 100 at most"
_SEED_LIMIT = 2**32
#: Of a session's models, samplers and losses: their numbers stand in names of folders.
MAX_PLACE = 2**31 - 1
#: Completions of a prompt that one request may ask for.
MAX_SAMPLES = 4096
#: Some centuries: later than that there are no dates.
MAX_TTL_SECONDS = 10**10


def is_name(text: str) -> bool:
    """Whether a checkpoint may be called so."""
    return _NAME.fullmatch(text) is not None


class Request(BaseModel):
    """A request in JSON; `type` only repeats what the path says."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    type: str | None = None


Some = TypeVar("Some", bound=Request)


def read_json(kind: type[Some], body: bytes) -> Some:
    """A request of a kind; raises CommandRefused, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CommandRefused(
            "the request is wrong",
            field=".".join(map(str, first["loc"])) or None,
            found=first["msg"],
        ) from error


class AdamParams(Request):
    """Hyperparameters of one step of AdamW; the defaults are the client's."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0

    def as_options(self) -> dict[str, float]:
        """As `GroupStep.apply` takes them."""
        return {
            "lr": self.learning_rate, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps,
            "weight_decay": self.weight_decay, "max_grad_norm": max(self.grad_clip_norm, 0.0),
        }  # fmt: skip


class Optimizer(Request):
    """Which optimizer a model has."""

    @model_validator(mode="after")
    def _is_here(self) -> Self:
        if self.type not in (None, "adamw"):
            raise ValueError(f"'{self.type}' is not served: use adamw, or leave it out")
        return self


class Addressed(Request):
    """A request to a model."""

    model_id: str
    seq_id: int


class OptimStep(Addressed):
    """One optimizer step from what was gathered."""

    adam_params: AdamParams


class LoraConfig(Request):
    """The adapter of a new model."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Request):
    """A new model."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig = LoraConfig(rank=32)
    optimizer_config: Optimizer = Optimizer()

    def config(self, model: str) -> dict[str, Any]:
        """The adapter's config; without a seed it follows from the model's id."""
        lora = self.lora_config
        seed = zlib.crc32(model.encode()) if lora.seed is None else lora.seed
        return lora.model_dump(exclude={"type"}) | {"seed": seed % _SEED_LIMIT}


class LoadWeights(Request):
    """A model goes on from a checkpoint: a new one, or one that is there."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer = Optimizer()
    weights_access_token: None = None


class SaveWeights(Addressed):
    """A checkpoint of a model under a name.

    checkpoint   its kind
    """

    checkpoint: ClassVar[Kind] = "weights"

    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_SECONDS)
    user_metadata: dict[str, str] | None = None
    overwrite: bool = False

    @field_validator("path")
    @classmethod
    def _is_a_name(cls, path: str | None) -> str | None:
        if path is not None and not is_name(path):
            raise ValueError(f"a name has {NAME}")
        return path


class SaveWeightsForSampler(SaveWeights):
    """A version of a model to sample from: under a name, or of a sampling session."""

    checkpoint: ClassVar[Kind] = "sampler_weights"

    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=MAX_PLACE)
    kind: Literal["snapshot"] = "snapshot"


class SaveWeightsExternal(SaveWeights):
    """A PEFT folder of a model under a name, to download."""

    checkpoint: ClassVar[Kind] = "external_weights"

    path: str
    age_encryption_recipients: None = None


class TokenChunk(Request):
    """Tokens of a prompt."""

    tokens: list[int]


class Prompt(Request):
    """A prompt of tokens."""

    chunks: list[TokenChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Request):
    """How tokens are drawn."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Sample(Request):
    """Completions of a prompt."""

    prompt: Prompt
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: int
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    # What the service does not do is refused by name.
    base_model: None = None
    model_path: None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
