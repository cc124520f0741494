"""Completions of prompts by the jobs of a `GroupStep`, for loops that learn from what they draw.

transformers has continuous batching of its own. It is not used here: it draws all requests from
one global generator, so a completion depends on its neighbours; its log-probabilities are those of
the distribution after temperature and filters; and it runs another module than the one that
trains, which a quantised base and adapters by token would have to be put into once more. The fused
graph has all of this already, and its log-probabilities are the trainer's.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tlora_fx.config.job import Job
from tlora_fx.errors import GenerationError
from tlora_fx.ir.graph import HEAD, is_call, placeholders
from tlora_fx.model.backbone import longest_sequence
from tlora_fx.model.batch import IGNORED
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.ops.paged_attention import KeyValuePages, page_tokens
from tlora_fx.passes.operator_facts import argument
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.generation import generation_config
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.isolation import is_out_of_memory
from tlora_fx.runtime.launching.cpu_threads import few_threads
from tlora_fx.runtime.launching.torch_modes import in_default_modes
from tlora_fx.runtime.sampling.draw import DrawOptions, numbers_of
from tlora_fx.runtime.sampling.engine import Engine, FinishReason, GrowingSequence, Request
from tlora_fx.runtime.sampling.token_graphs import TokenGraphs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_ops = torch.ops.tlora_fx


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of a prompt by a job's adapter.

    prompt          token ids
    tokens          token ids, a stop token included
    logprobs        of each token, without temperature, top-k and top-p: what the trainer computes
    finish_reason   "stop": by `stop`; "length": by `max_new_tokens` or the base's positions;
                    "not_finite": the adapter's numbers for the next token are NaN or infinite
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    def to_sample(self, advantage: float) -> Sample:
        """A sample for losses such as `"ppo"`: each token of the completion is worth the same."""
        before, drawn = len(self.prompt), len(self.tokens)
        return Sample(
            input_ids=(*self.prompt, *self.tokens),
            labels=(*[IGNORED] * before, *self.tokens),
            logprobs=(*[0.0] * before, *self.logprobs),
            advantages=(*[0.0] * before, *[advantage] * drawn),
        )


@dataclass(eq=False)
class Sampler:
    """Draws completions with the adapters that a `GroupStep` trains, all jobs in one batch.

    Nothing is copied or loaded: each call sees the adapters as they are then. Keys and values are
    kept in pages. On a GPU tokens are drawn by CUDA graphs, and those and the pages stay for the
    next call, until `release`, or until a row of the step needs the memory; else a call allocates
    and frees its pages.

    step            one process runs it
    tokenizer       for stop strings; by default the base's
    max_sequences   completions that grow at a time; others wait for a place
    cache_tokens    tokens whose keys and values fit into the pages; by default those of the
                    `max_sequences` longest of a call
    refused         why tokens of the model are not drawn by CUDA graphs on a GPU, or ""
    between         called after each token of all completions that grow; it may train other jobs,
                    and lets none in or out
    raises          GenerationError for a model that cannot continue from kept keys and values
    """

    step: GroupStep
    tokenizer: PreTrainedTokenizerBase | None = None
    max_sequences: int = 64
    cache_tokens: int | None = None
    graphs: TokenGraphs | None = field(default=None, init=False, repr=False)
    refused: str = field(default="", init=False)
    between: Callable[[], None] = lambda: None
    _positions: int | None = field(init=False)

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise _refused_argument("max_sequences", "1 or more", self.max_sequences)
        if self.step.mesh.size > 1:
            raise GenerationError(
                "a sampler runs in one process", found=f"a plan of {self.step.mesh.size}"
            )
        self._positions = _positions_of(self.step.model)
        self.step.keepers.add(self)

    @in_default_modes
    def sample(
        self,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        *,
        max_new_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[int | str] | None = None,
        seed: int | None = None,
    ) -> dict[str, list[list[Completion]]]:
        """Completions of each job's prompts.

        prompts          by job name, token ids of each prompt
        max_new_tokens   of a completion at most; fewer where the base has no more positions
        n                completions of each prompt
        temperature      logits are divided by it; 0: the most likely token each time
        top_p            tokens are drawn of the fewest that have this probability together
        top_k            tokens are drawn of the k most likely; 0: of all
        stop             token ids and strings that end a completion, and are its end; by default
                         the base's end tokens; (): none
        seed             a completion depends on it, on the adapter and on the prompt, not on
                         others; completions of equal prompts differ. By default drawn from torch's
                         generator
        returns          by job name: `n` completions of each prompt, in the order given
        raises           StepMisuse for a job that does not train here, and under autocast;
                         GenerationError for a prompt or a number that cannot be, before anything
                         runs. Where there is no memory beside captured rows of the step, these are
                         freed first, and all completions drawn again
        """
        options = DrawOptions(temperature, top_k, top_p)
        require_options(options, max_new_tokens, n)
        if self.step.runner is None:
            self.step.prepare()
        requests = {
            name: [self._request(name, prompt, max_new_tokens) for prompt in given]
            for name, given in prompts.items()
        }
        seed = int(torch.randint(2**63 - 1, ()).item()) if seed is None else seed
        stops = self._stops(stop)
        grown = self._grown(requests, n, seed, options, stops, may_fail=True)
        if grown is None:
            # Captured rows of the step keep memory that completions have no use for.
            logger.warning("no memory for completions: captured rows are freed, and they run again")
            self.step.free_memory()
            grown = self._grown(requests, n, seed, options, stops, may_fail=False)
            assert grown is not None
        return {
            name: [[_completion(each) for each in of[at : at + n]] for at in range(0, len(of), n)]
            for name, of in grown.items()
        }

    def _grown(
        self,
        requests: Mapping[str, Sequence[Request]],
        n: int,
        seed: int,
        options: DrawOptions,
        stops: Callable[[Sequence[int]], bool],
        *,
        may_fail: bool,
    ) -> dict[str, list[GrowingSequence]] | None:
        """The completions of each job; None where there was no memory and it may fail.

        may_fail   where the step has captured rows, whose memory can be freed
        """
        grown = {name: [*_sequences(of, n, seed)] for name, of in requests.items()}
        every = [sequence for of in grown.values() for sequence in of]
        if not every:
            return grown
        try:
            with few_threads(self.step.model.backbone.model, self.step.mesh.device):
                engine = self._engine(every, options, stops)
                engine.run(every)
        except Exception as error:
            rows = self.step.graphs
            if not (may_fail and is_out_of_memory(error) and rows is not None and rows.keys):
                raise
            return None
        if engine.graphs is not None and engine.graphs is not self.graphs:
            engine.graphs.release()  # A row that trained in between needed the memory.
        return grown

    def _request(self, name: str, prompt: Sequence[int], limit: int) -> Request:
        member, positions = self.step.member(name), self._positions
        ids = require_prompt(member.job, prompt, self.step.model.group.vocabulary)
        if positions is not None:
            if len(ids) >= positions:
                expected = f"fewer than {positions} tokens, the base's positions"
                raise _refused_prompt(member.job, expected, len(ids), "shorten it")
            limit = min(limit, positions - len(ids))
        return Request(member.index, ids, limit)

    def _engine(
        self,
        sequences: Sequence[GrowingSequence],
        options: DrawOptions,
        stops: Callable[[Sequence[int]], bool],
    ) -> Engine:
        """An engine whose pages hold each of these sequences."""
        device = self.step.mesh.device
        size = page_tokens(device)
        needs = sorted((-(-each.request.kept // size) for each in sequences), reverse=True)
        pages = sum(needs[: self.max_sequences])
        if self.cache_tokens is not None:
            pages = -(-self.cache_tokens // size)
        if needs[0] > pages:
            raise _refused_argument(
                "cache_tokens", f"{needs[0] * size} or more, for one completion", self.cache_tokens
            )
        return Engine(
            self.step.model,
            device,
            options,
            pages=pages,
            max_sequences=self.max_sequences,
            max_row_tokens=self.step.row_tokens,
            stops=stops,
            graphs=self._graphs_for(pages, needs[0], options),
            between=self.between,
        )

    def release(self) -> None:
        """Free the pages and graphs that were kept for the next call."""
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    def _graphs_for(self, pages: int, width: int, options: DrawOptions) -> TokenGraphs | None:
        """Graphs whose pages hold so many, of sequences of up to `width`, and one that is spare."""
        device = self.step.mesh.device
        if device.type != "cuda" or not self.step.options.cuda_graphs or is_strict():
            return None
        if self.graphs is not None and self.graphs.refused:
            self.refused = self.graphs.refused
            self.release()
        if self.refused:
            return None
        if self.graphs is None or not self.graphs.fits(pages + 1, width, options):
            self.release()
            cache = KeyValuePages(pages + 1, page_tokens(device))
            self.graphs = TokenGraphs(self.step.model, device, cache, options, width)
        return self.graphs

    def _stops(self, stop: Sequence[int | str] | None) -> Callable[[Sequence[int]], bool]:
        """Whether a completion ends with its last token."""
        if stop is None:
            tokens, strings = _end_tokens(self.step.model), list[str]()
        else:
            tokens, strings = split_stop(stop)
        if not strings:
            return lambda written: written[-1] in tokens
        tokenizer = self.tokenizer or load_tokenizer(self.step.model.backbone.spec)
        # A token is a byte at least; some tokens more, for one of them may begin inside a letter.
        tail = max(len(each.encode()) for each in strings) + 8

        def stops(written: Sequence[int]) -> bool:
            if written[-1] in tokens:
                return True
            text: Any = tokenizer.decode([*written[-tail:]], clean_up_tokenization_spaces=False)
            return any(each in text for each in strings)

        return stops


def require_prompt(job: Job, prompt: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The token ids of a prompt; raises GenerationError where it has none, or unknown ones."""
    if isinstance(prompt, (str, int)):
        raise _refused_prompt(
            job, "a list of token ids", repr(prompt)[:80], "encode it: tokenizer(text)"
        )
    ids = tuple(int(token) for token in prompt)
    if not ids:
        raise _refused_prompt(job, "a token at least", "none", "begin with a token")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise _refused_prompt(job, f"token ids from 0 to {vocabulary - 1}", wrong)
    return ids


def split_stop(stop: Sequence[int | str]) -> tuple[set[int], list[str]]:
    """Token ids and strings that end a completion; raises GenerationError for anything else."""
    given = [stop] if isinstance(stop, (str, int)) else stop
    tokens = {each for each in given if isinstance(each, int)}
    strings = [each for each in given if isinstance(each, str)]
    if len(tokens) + len(strings) < len(set(given)) or "" in strings:
        raise _refused_argument("stop", "token ids and strings that are not empty", stop)
    return tokens, strings


def _sequences(requests: Sequence[Request], n: int, seed: int) -> Iterator[GrowingSequence]:
    """`n` sequences of each of a job's requests."""
    seen = Counter[tuple[int, ...]]()
    for request in requests:
        occurrence = seen[request.prompt]
        seen[request.prompt] += 1
        for sample in range(n):
            numbers = numbers_of(seed, request.prompt, occurrence, sample, request.limit)
            yield GrowingSequence(request, numbers)


def _completion(grown: GrowingSequence) -> Completion:
    assert grown.finish_reason is not None
    said = tuple(grown.tokens), tuple(grown.logprobs)
    return Completion(grown.request.prompt, *said, grown.finish_reason)


def _end_tokens(model: SuperModel) -> set[int]:
    config = generation_config(model.backbone)
    ends = getattr(config, "eos_token_id", None)
    return set(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))


def _positions_of(model: SuperModel) -> int | None:
    """Tokens of a sequence at most, None where there is no limit.

    raises    GenerationError where a token needs more of the tokens before it than keys and values
    """
    group = model.group
    if HEAD not in group.blocks or model.backbone.spec.objective != "tokens":
        raise GenerationError(
            "the model gives no logits of next tokens to draw from",
            expected="a causal language model, compiled with lower-loss",
        )
    if group.form != "packed":
        raise GenerationError(
            "the base runs in padded lines, which keep no keys and values",
            help="use tlora-fx generate after training",
        )
    limits = [longest_sequence(model.backbone.model)]
    for graph in (group.root, *(block.graph for block in group.blocks.values())):
        starts = placeholders(graph).get("cu_seqlens")
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_call(node, _ops.segment_switch.default):
                limits.append(argument(node, "threshold"))
            elif _is_kept(node, starts):
                continue
            elif starts in node.all_input_nodes or is_call(node, _ops.packed_attention.default):
                raise GenerationError(
                    "the base has an operator that needs more of earlier tokens than what is kept",
                    operator=node.target,
                    module=node.meta.get("path") or None,
                    help="use tlora-fx generate after training",
                )
    return min((limit for limit in limits if limit is not None), default=None)


def _is_kept(node: fx.Node, starts: fx.Node | None) -> bool:
    """Whether a node is attention of the whole row to earlier tokens alone."""
    if not is_call(node, _ops.packed_attention.default):
        return False
    return argument(node, "cu_seqlens") is starts and bool(argument(node, "causal"))


def require_options(options: DrawOptions, max_new_tokens: int, n: int) -> None:
    """Refuse numbers out of range."""
    wrong = (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("n", n, n >= 1, "1 or more"),
        (
            "temperature",
            options.temperature,
            0 <= options.temperature < math.inf,
            "0 or more; 0: the most likely token each time",
        ),
        ("top_p", options.top_p, 0 < options.top_p <= 1, "above 0, and 1 at most"),
        ("top_k", options.top_k, options.top_k >= 0, "0 or more; 0: all tokens"),
    )
    for name, value, fits, expected in wrong:
        if not fits:
            raise _refused_argument(name, expected, value)


def _refused_argument(name: str, expected: str, found: Any) -> GenerationError:
    return GenerationError(f"{name} cannot have this value", expected=expected, found=found)


def _refused_prompt(job: Job, expected: str, found: object, help: str = "") -> GenerationError:
    return GenerationError(
        "a prompt cannot be continued", job=job.name, expected=expected, found=found, help=help
    )
