"""Losses by name, for job files, loops of one's own and the endpoint; and the loss of a job.

What each computes stands in `tlora_fx.model.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from tlora_fx.config.functions import OR_FUNCTION, UserFunction
from tlora_fx.config.validation import refuse

Method = Literal["sft", "dpo", "orpo", "kto", "reward"]

#: What a sample may say of a token, in the order of the columns of `TokenTerms.values`.
FIELDS = ("weights", "logprobs", "advantages")
#: Losses by token, each with its options and their defaults.
BY_TOKEN: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {"label_smoothing": 0.0},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
#: Losses by sequence, each with its options and their defaults.
BY_SEQUENCE: Mapping[str, Mapping[str, float]] = {
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
}
LOSSES = {**BY_TOKEN, **BY_SEQUENCE}
#: What a sample has to say of its tokens for a loss; `weights` are 1 where it says nothing.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro", "gspo"), FIELDS[1:]),
    "kto": ("desirable",),
}
#: A log-probability that was sampled with is at most 0, up to rounding: in float32, that of logits
#: of up to 1,000 stays below this.
MAX_LOGPROB = 1e-3
#: Losses that a job may name: kto is a method there.
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
if TYPE_CHECKING:
    Loss = LossName | UserFunction | None
else:
    Loss = Annotated[LossName | None, *OR_FUNCTION]

#: Trainers that learn from what an adapter has sampled.
_SAMPLING = ("grpo", "rloo", "reinforce", "online_dpo")
LOOP = "write the loop with GroupStep and Sampler: docs/group-step.md, docs/sampling.md"


def reads_logprobs(loss: object) -> bool:
    """Whether a loss with a name reads the log-probabilities that tokens were sampled with."""
    return isinstance(loss, str) and "logprobs" in NEEDS.get(loss, ())


def require_learnt_from_rows(field: str, value: Any) -> Any:
    """Refuse, in a job's `method` or `loss`, what is of the other one, or of a loop.

    raises    PydanticCustomError
    """
    methods, losses = get_args(Method), get_args(LossName)
    if field == "loss" and value in methods[1:]:
        raise refuse(f"'{value}' is a method", help=f"method: {value}")
    if field == "method" and callable(value):
        what = "a method is no function"
        raise refuse(what, expected=f"one of {', '.join(methods)}", help="give it as 'loss'")
    if field == "method" and value in losses:
        help = f"loss: {value} learns from rows that were sampled before; or {LOOP}"
        raise refuse(f"'{value}' is a loss", expected=f"one of {', '.join(methods)}", help=help)
    if value in _SAMPLING:
        known = methods if field == "method" else losses
        what = f"{field} '{value}' learns from what the job samples"
        raise refuse(what, expected=f"one of {', '.join(known)}", help=LOOP)
    return value


def require_loss_options(loss: str | UserFunction | None, options: Mapping[str, float]) -> None:
    """Refuse options that a job's loss does not have.

    raises    PydanticCustomError
    """
    known = LOSSES[loss] if isinstance(loss, str) and loss != "cross_entropy" else {}
    what = f"the loss '{loss or 'cross_entropy'}'"
    if isinstance(loss, UserFunction):
        what = "a function"
    for name in options:
        if name not in known:
            expected = ", ".join(known) or "no options"
            raise refuse(f"{what} has no '{name}'", expected=expected)
