"""The cycle: what models of clients may run now, together, and each one's answer at once.

Each model gives one piece a cycle: the small requests for gradients that it has sent, packed, or a
part of a large one, which is cut by its own size alone. So who asks for little waits for a piece of
others, and not for all that they ask for. Pieces of all models share one forward and backward, and
where they are too many for a cycle, fair shares decide whose run. Steps that are due then are done
together. A failure is the answer of the request that caused it, and of no other. The log is told
which pieces ran together and how long that took. While completions grow, half of the time is for
gradients and steps.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from tlora_fx.config.losses import BY_TOKEN
from tlora_fx.errors import CommandRefused, NotFinite, TloraError
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.runtime.data.batching import count_tokens
from tlora_fx.runtime.group_step import Gathered
from tlora_fx.runtime.step_batches import Batch, StepOutput, require_batch
from tlora_fx.training import requests
from tlora_fx.training.custom_loss import CreateCustomLoss, CustomLoss
from tlora_fx.training.datums import MICRO_TOKENS, batch_of, loss_of
from tlora_fx.training.engine import Engine, LoggedLayers
from tlora_fx.training.folders import version_folder
from tlora_fx.training.log import LOSS, WAITING, CommandLog, sampler_id
from tlora_fx.training.messages import forward_output, read_request
from tlora_fx.training.records import (
    PROTOBUF,
    Answer,
    Checkpoint,
    Command,
    Outcome,
    Ran,
    Sampler,
    json_answer,
)
from tlora_fx.training.sampling import Asked, draw, read_sample
from tlora_fx.training.tenants import NoRoom, Tenants
from tlora_fx.training.versions import Version

logger = logging.getLogger(__name__)
FORWARD, STEP, SAMPLE = "forward_backward", "optim_step", "sample"
#: Of a cycle; a piece that is larger runs alone.
CYCLE_TOKENS = 8192
#: Of a request that is read before its turn. A token and what is said of it take about 20.
AHEAD_BYTES = 32 * MICRO_TOKENS
#: After which a model or sampler that finds no place is said to wait for one.
WAITING_SECONDS = 5.0
LOADS = ("create_model", "load_model", "load_weights")
SAVES: Mapping[str, type[requests.SaveWeights]] = {
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveWeightsForSampler,
    "save_weights_external": requests.SaveWeightsExternal,
}


@dataclass(eq=False, slots=True)
class Forward:
    """A request for gradients or log-probabilities that was read and checked, as far as it is.

    pieces   micro-batches that are still to run, as batches
    cuts     data of each of all its pieces
    before   what its model had gathered when it began
    """

    command: Command
    pieces: deque[Batch]
    cuts: tuple[int, ...]
    forward_only: bool
    before: Gathered | None = None
    loss: float = 0.0
    tokens: int = 0
    logprobs: list[Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def take(self, output: StepOutput) -> None:
        """Add what its first piece came to."""
        self.pieces.popleft()
        self.logprobs += output.logprobs or ()
        self.loss, self.tokens = self.loss + output.loss, self.tokens + output.tokens
        for name, value in (pair for each in output.metrics for pair in each.items()):
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def next_tokens(self) -> int:
        """Tokens of its next piece."""
        return count_tokens(self.pieces[0].micro_batches)

    @property
    def packing(self) -> tuple[object, ...] | None:
        """Key of requests whose samples may share a micro-batch; None: it shares none."""
        batch = self.pieces[0]
        whole = len(self.pieces) == 1 and not (self.logprobs or self.forward_only)
        return (batch.loss, batch.loss_options) if whole and batch.loss in BY_TOKEN else None

    def outcome(self) -> Outcome:
        """Its answer, once no piece is left."""
        arrays = [each.double().cpu().numpy() for each in self.logprobs]
        targets = float(sum(map(len, arrays)))
        own = {
            name: value / len(arrays) if name.endswith(":mean") else value
            for name, value in self.metrics.items()
        }
        body = forward_output(arrays, {"loss:sum": self.loss, "tokens:sum": targets, **own})
        return Outcome(self.command, Answer(PROTOBUF, body), self.tokens, cuts=self.cuts)


def _packed(forwards: Sequence[Forward]) -> Batch:
    """The next pieces of requests as one micro-batch."""
    first, *_ = batches = [each.pieces[0] for each in forwards]
    samples = [sample for each in batches for micro in each.micro_batches for sample in micro]
    return replace(first, micro_batches=[samples])


def _scored(batch: Batch, logprobs: Sequence[Tensor]) -> StepOutput:
    """The output of a batch from its log-probabilities."""
    tokens, terms = count_tokens(batch.micro_batches), sum(map(len, logprobs))
    return StepOutput(loss_of(batch, logprobs), tokens, terms, logprobs=tuple(logprobs))


class FairShares:
    """Shares the tokens of each cycle equally among the models that wait, by deficit round robin.

    A model that had less than its share comes first, one that had more comes last. Nobody owes
    anything once a cycle had room for all: what was free then was taken from nobody.

    budget   tokens of a cycle; a piece that is larger runs alone
    source   Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._deficits: dict[str, float] = {}

    def choose(self, costs: Mapping[str, int]) -> list[str]:
        """Models whose pieces run now: as many as fit the budget, and one at least.

        costs   by model, tokens of its next piece; who waits longest comes first
        """
        share = self.budget / max(1, len(costs))
        for name in [*self._deficits.keys() - costs.keys()]:
            # Who is away keeps its debts and earns, but saves nothing.
            self._deficits[name] = min(self._deficits[name] + share, 0.0)
        for name, cost in costs.items():
            earned = self._deficits.get(name, 0.0) + share
            self._deficits[name] = min(earned, max(share, cost))
        chosen: list[str] = []
        left = self.budget
        for name in sorted(costs, key=lambda name: -self._deficits[name]):
            if not chosen or costs[name] <= left:
                chosen.append(name)
                left -= costs[name]
                self._deficits[name] -= costs[name]
        if len(chosen) == len(costs):
            self._deficits.clear()
        return chosen


class Cycle:
    """Runs the commands of a log on an engine.

    finished         is told the numbers of commands that have an answer now
    snapshot_every   commands of a model between two snapshots of it, at least
    snapshot_share   of the time of all cycles that snapshots may take
    layers           compile while cycles run, and take over between two
    active           models that had gradients or a step the last time any had
    """

    def __init__(
        self,
        log: CommandLog,
        engine: Engine,
        finished: Callable[[Iterable[int]], None] = lambda numbers: None,
        snapshot_every: int = 64,
        snapshot_share: float = 0.1,
    ) -> None:
        self.log, self.engine, self.finished = log, engine, finished
        self.snapshot_every, self.snapshot_share = snapshot_every, snapshot_share
        self.tenants = Tenants(engine, log)
        self.layers = LoggedLayers(log, engine.step)
        self.active: frozenset[str] = frozenset()
        self.shares = FairShares(CYCLE_TOKENS)
        # By model, the requests of its next piece: several only where they are packed.
        self._running: dict[str, list[Forward]] = {}
        self._busy: set[str] = set()
        # Models and samplers without a place, since when, and of which the log was told.
        self._denied: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._told: list[str] = []
        self._starved = False
        # Seconds of what was timed inside of something else that is, and when a wave may interrupt.
        self._inside = self._next_wave = 0.0
        if engine.sampler is not None:
            engine.sampler.between = self._between

    def run(self) -> bool:
        """Run a piece of each of what may run now; False where nothing may."""
        self.layers.look()
        runnable = self.log.runnable()
        self._busy, self._denied = set(self._running), set()
        samples = [c for own in runnable.values() for c in own if c.kind == SAMPLE]
        ran = False
        if self._starved:
            # Models that always have something to run would leave no room for a version.
            ran, samples = self._sample(samples), []
        waiting = [own for own in runnable.values() if own[0].kind != SAMPLE]
        turns: dict[str, list[Command]] = {}
        # Who has waited longest comes first, for there may not be room for all.
        for commands in sorted(waiting, key=lambda own: own[0].number):
            head = commands[0]
            try:
                if head.seq > 0:
                    self.bring(head.queue)
                self._busy.add(head.queue)
                if head.kind in (FORWARD, STEP):
                    turns[head.queue] = commands
                else:
                    self._finish([self._alone(head)])
            except NoRoom:
                self._busy.discard(head.queue)
                self._denied.add(head.queue)
                continue
            except (OSError, sqlite3.Error):
                raise
            except Exception as error:  # noqa: BLE001  (it is the answer)
                self._finish([self._failed(head, error)])
            ran = True
        if turns:
            self.active = frozenset(turns)
            self._wave(turns)
        ran = (bool(samples) and self._sample(samples)) or ran
        self._tell(self._denied)
        return ran

    def _tell(self, denied: set[str]) -> None:
        """Let the log say who has waited for a place for a while."""
        now = time.monotonic()
        self._waiting = {queue: self._waiting.get(queue, now) for queue in sorted(denied)}
        late = [at for at, since in self._waiting.items() if now - since >= WAITING_SECONDS]
        if late != self._told:
            self.log.tell({WAITING: late})
            self._told = late

    def bring(self, name: str) -> None:
        """See that a model is in the banks, with all that has run.

        raises   NoRoom; CommandRefused where it was never made; CheckpointError
        """
        if name in self.tenants.resident:
            self.tenants.use(name)
            return
        # Before the log is read: it names the snapshot that is there.
        self.tenants.settle(name)
        model = self.log.model(name)
        if model.config is None:
            raise CommandRefused("the model was never made: its creation failed", model=name)
        try:
            self.tenants.enter(model, busy=self._busy)
            at = self.tenants.resident[name].ran if name in self.tenants.resident else -1
            again = self.log.done_since(name, at)
            for command in again:
                self._again(command)
            if any(self.layers.runs_otherwise(each) for each in again):
                # What comes next follows from these bits, so nobody may compute others again.
                self.tenants.keep(name).result()
        except BaseException:
            # Whoever is resident has all that has run.
            self._running.pop(name, None)
            self.tenants.leave(name)
            raise

    def forget(self) -> None:
        """Drop all that lies in memory, after a failure in the middle: the log has the truth."""
        self._running.clear()
        self.tenants.forget()

    def _again(self, command: Command) -> None:
        """Run a command whose answer is written; one that failed fails again."""
        if command.kind == FORWARD:
            plain = self.layers.plain_pieces(command)
            self._begin([command])
            while command.queue in self._running:
                with self.engine.step.uncompiled() if plain > 0 else nullcontext():
                    self._run_pieces([command.queue])
                plain -= 1
        elif command.kind == STEP:
            self._step({command.queue: command})
        elif command.kind in LOADS:
            self._load(command)
        self.tenants.resident[command.queue].ran = command.seq

    # Gradients and steps.

    def _wave(self, turns: Mapping[str, Sequence[Command]]) -> None:
        """A piece of each model, and the steps that are due then."""
        outcomes: list[Outcome] = []
        for own in turns.values():
            if own[0].kind == FORWARD:
                outcomes += self._begin(own)
        costs = {
            model: sum(each.next_tokens for each in self._running[model])
            for model in turns
            if model in self._running
        }
        chosen = self.shares.choose(costs)
        tokens = {each.command: each.next_tokens for own in chosen for each in self._running[own]}
        with self._timed(FORWARD, tokens) as ran:
            outcomes += self._run_pieces(chosen)
        self._finish(outcomes, ran)
        done = {outcome.command.number for outcome in outcomes}
        due = {}
        for model, own in turns.items():
            left = [command for command in own if command.number not in done]
            if left and left[0].kind == STEP:
                due[model] = left[0]
        with self._timed(STEP, dict.fromkeys(due.values(), 0)) as ran:
            outcomes = self._step(due)
        self._finish(outcomes, ran)
        self._take_snapshots()

    @contextmanager
    def _timed(self, kind: str, tokens: Mapping[Command, int]) -> Iterator[Ran]:
        """Times what runs inside of these commands together."""
        ran, outside = Ran(kind, self.log.now(), tokens), self._inside
        self._inside, start = 0.0, time.perf_counter()
        yield ran
        seconds = time.perf_counter() - start
        ran.seconds, self._inside = seconds - self._inside, outside + seconds

    def _begin(self, commands: Sequence[Command]) -> list[Outcome]:
        """Read what a model runs next; the failure of its first request, if it fails.

        commands   that it may run, in order; the first is for gradients
        """
        model = commands[0].queue
        if model not in self._running:
            try:
                self._running[model] = [self._read(commands[0])]
            except Exception as error:  # noqa: BLE001  (it is the answer)
                return [self._failed(commands[0], error)]
        # Strict bits depend on rows, which may not depend on when a request arrives.
        if not is_strict():
            self._pack(self._running[model], commands)
        return []

    def _pack(self, running: list[Forward], commands: Sequence[Command]) -> None:
        """Read further small requests, as long as they fit one micro-batch with those before."""
        packing, left = running[0].packing, MICRO_TOKENS - sum(each.next_tokens for each in running)
        for command in commands[len(running) :]:
            if packing is None or left <= 0 or command.kind != FORWARD:
                return
            body = self.log.body_of(command)
            if len(body) > AHEAD_BYTES:
                return
            try:
                forward = self._read(replace(command, body=body))
            except Exception:  # noqa: BLE001  (it fails again when it comes first)
                return
            left -= forward.next_tokens
            if left < 0 or forward.packing != packing:
                return
            running.append(forward)

    def _run_pieces(self, models: Iterable[str]) -> list[Outcome]:
        """Run a piece of each model; what is done then."""
        outcomes: list[Outcome] = []
        asked = {model: self._running[model] for model in models}
        found = self._accumulate(
            {model: own for model, own in asked.items() if not own[0].forward_only}
        )
        for model, own in asked.items():
            outputs = found[model] if model in found else [self._score(model, own[0])]
            if done := [each for each in map(self._taken, own, outputs) if each is not None]:
                del self._running[model]
                outcomes += done
        return outcomes

    def _taken(self, forward: Forward, output: StepOutput | Exception) -> Outcome | None:
        """Add what a request's piece came to; the request's outcome, once it has one."""
        wrong = output if isinstance(output, Exception) else output.error
        if wrong is not None:
            if forward.before is not None:
                resident = self.tenants.resident[forward.command.queue]
                self.engine.step.put_back(resident.name, forward.before)
            return self._failed(forward.command, wrong)
        assert not isinstance(output, Exception)
        assert output.logprobs is not None
        forward.take(output)
        return None if forward.pieces else forward.outcome()

    def _read(self, command: Command) -> Forward:
        """A request that can be run; raises CommandRefused, StepMisuse."""
        request = read_request(command.body or self.log.body_of(command))
        custom = None
        if request.loss == "custom":
            name = str(request.options.get("loss_id"))
            custom = self._custom_loss(self.log.loss(name, command.user))
        batch = batch_of(request, self.engine.positions, custom, command.cuts)
        resident = self.tenants.resident[command.queue]
        vocabulary = self.engine.step.model.group.vocabulary
        job = self.tenants.member(command.queue).job
        require_batch(job, batch, vocabulary, alone=True)
        pieces = deque(replace(batch, micro_batches=[micro]) for micro in batch.micro_batches)
        if custom is not None:
            said = iter([custom.read(at, each.inputs) for at, each in enumerate(request.data)])
            for at, micro in enumerate(batch.micro_batches):
                loss = partial(custom, [*islice(said, len(micro))])
                pieces[at] = replace(pieces[at], loss=loss)
        cuts = tuple(map(len, batch.micro_batches))
        forward = Forward(command, pieces, cuts, request.forward_only)
        if len(pieces) > 1 and not request.forward_only:
            # Of a single piece that fails, nothing stays anyway.
            forward.before = self.engine.step.gathered(resident.name)
        return forward

    def _accumulate(
        self, asked: Mapping[str, Sequence[Forward]]
    ) -> dict[str, list[StepOutput | Exception]]:
        """Gradients of one piece of each model, together; what each request came to."""
        if not asked:
            return {}
        if len(asked) > 1 and is_strict() and not self.engine.is_by_kernels:
            return self._one_by_one(asked)
        by_token = {model: own for model, own in asked.items() if own[0].pieces[0].loss in BY_TOKEN}
        if 0 < len(by_token) < len(asked):
            # A loss of sequences would change how its neighbours' rows run.
            rest = {model: own for model, own in asked.items() if model not in by_token}
            return self._accumulate(by_token) | self._accumulate(rest)
        names = {self.tenants.resident[model].name: model for model in asked}
        batches = {name: _packed(asked[model]) for name, model in names.items()}
        found: dict[str, StepOutput | Exception] = {}
        try:
            for name, output in self.engine.step.accumulate(batches).items():
                found[names[name]] = output
        except Exception as error:  # noqa: BLE001  (it is the answer)
            if len(asked) > 1:
                # It was no single model's fault; alone, some may fit.
                return self._one_by_one(asked)
            found = dict.fromkeys(asked, error)
        return {model: self._outputs(model, own, found[model]) for model, own in asked.items()}

    def _one_by_one(
        self, asked: Mapping[str, Sequence[Forward]]
    ) -> dict[str, list[StepOutput | Exception]]:
        return {model: self._accumulate({model: own})[model] for model, own in asked.items()}

    def _outputs(
        self, model: str, own: Sequence[Forward], output: StepOutput | Exception
    ) -> list[StepOutput | Exception]:
        """What each request of a piece came to."""
        if len(own) == 1:
            return [output]
        if isinstance(output, Exception) or output.error is not None:
            # Alone, those that are not at fault do not fail.
            return [each for one in own for each in self._accumulate({model: [one]})[model]]
        logprobs = iter(output.logprobs or ())
        batches = [each.pieces[0] for each in own]
        return [_scored(each, [*islice(logprobs, len(each.micro_batches[0]))]) for each in batches]

    def _score(self, model: str, forward: Forward) -> StepOutput | Exception:
        """The loss and log-probabilities of one piece, without gradients."""
        name, batch = self.tenants.resident[model].name, forward.pieces[0]
        try:
            return _scored(batch, self.engine.step.score({name: batch.micro_batches})[name])
        except Exception as error:  # noqa: BLE001  (it is the answer)
            return error

    def _step(self, due: Mapping[str, Command]) -> list[Outcome]:
        """One optimizer step of each of these models."""
        outcomes: list[Outcome] = []
        options: dict[str, dict[str, float]] = {}
        commands: dict[str, Command] = {}
        for model, command in due.items():
            name = self.tenants.resident[model].name
            try:
                body = command.body or self.log.body_of(command)
                request = requests.read_json(requests.OptimStep, body)
                if not self.tenants.is_dirty(model):
                    raise CommandRefused(
                        "there are no gradients to step by", help="call forward_backward first"
                    )
            except Exception as error:  # noqa: BLE001  (it is the answer)
                outcomes.append(self._failed(command, error))
                continue
            options[name], commands[name] = request.adam_params.as_options(), command
        try:
            updates = self.engine.step.apply(options) if options else {}
        except Exception as error:  # noqa: BLE001  (it is the answer)
            return outcomes + [self._failed(each, error) for each in commands.values()]
        for name, update in updates.items():
            if not update.updated:
                wrong = NotFinite("the gradients are not finite: the step was not done")
                outcomes.append(self._failed(commands[name], wrong))
                continue
            numbers = {
                "grad_norm": update.grad_norm, "learning_rate": update.learning_rate,
                "step": update.step,
            }  # fmt: skip
            outcomes.append(Outcome(commands[name], json_answer({"metrics": numbers})))
        return outcomes

    def _take_snapshots(self) -> None:
        for model in self._busy & set(self.tenants.resident):
            resident = self.tenants.resident[model]
            late = resident.ran - resident.kept >= self.snapshot_every
            late = late and self.tenants.keep_seconds <= self.snapshot_share * resident.since
            late = late and not self.tenants.is_writing
            # Of half a request there are gradients that nothing would take back.
            if late and model not in self._running:
                self.tenants.keep(model)

    # Models and versions.

    def _alone(self, command: Command) -> Outcome:
        """Run a command that is neither gradients nor a step."""
        try:
            command = replace(command, body=self.log.body_of(command))
            if command.kind in LOADS:
                return self._load(command)
            if command.kind == LOSS:
                self._custom_loss(command.body)
                return Outcome(
                    command, json_answer({"type": command.kind, "loss_id": command.queue})
                )
            if command.kind in SAVES:
                return self._save(command, requests.read_json(SAVES[command.kind], command.body))
            raise CommandRefused("there is no such command", found=command.kind)
        except NoRoom:
            raise
        except Exception as error:  # noqa: BLE001  (it is the answer)
            return self._failed(command, error)

    @staticmethod
    def _custom_loss(body: bytes) -> CustomLoss:
        return CustomLoss(requests.read_json(CreateCustomLoss, body))

    def _load(self, command: Command) -> Outcome:
        """Make a model, anew or from a checkpoint."""
        model = command.queue
        version: Version | None = None
        if command.kind == "create_model":
            request = requests.read_json(requests.CreateModel, command.body)
            self._require_base(request.base_model)
            self._require_rank(request.lora_config.rank)
            config = request.config(model)
            answer = {"type": "create_model", "model_id": model}
        else:
            load = requests.read_json(requests.LoadWeights, command.body)
            self._require_base(load.base_model)
            version = self.tenants.read(self.log.checkpoint(load.path, command.user).folder)
            if load.optimizer and version.state is None:
                raise CommandRefused(
                    "the checkpoint has no optimizer state",
                    found=load.path, help="load one that save_state made",
                )  # fmt: skip
            if not load.optimizer:
                version = Version(version.config, version.adapter)
            config = dict(version.config)
            answer = {"type": "load_weights", "path": load.path, "model_id": model}
        self.tenants.make(model, config, version, seq=command.seq, busy=self._busy)
        if version is not None:
            # The checkpoint may be deleted before this runs again.
            self.tenants.resident[model].ran = command.seq
            self.tenants.keep(model).result()
        return Outcome(command, json_answer(answer), config=config)

    def _require_rank(self, rank: int) -> None:
        most = self.engine.options.max_rank
        if rank > most:
            raise CommandRefused(
                "the rank is too large", expected=f"a rank of {most} at most", found=rank,
                help="ask the operator for a larger --tinker-rank",
            )  # fmt: skip

    def _require_base(self, name: str | None) -> None:
        options = self.engine.options
        # Who has to have a folder of the small base names that.
        if name not in (None, options.base_name, options.tokenizer):
            raise CommandRefused(
                "the service has another base", expected=options.base_name, found=name
            )

    def _save(self, command: Command, request: requests.SaveWeights) -> Outcome:
        """Write a version, and note what clients call it."""
        model, now = command.queue, self.log.now()
        row, config = self.log.model(model), self.tenants.resident[model].config
        kind, whole = request.checkpoint, request.checkpoint == "weights"
        folder = version_folder(model, command.seq)
        answer: dict[str, str] = {"type": command.kind}
        if isinstance(request, requests.SaveWeightsForSampler) and request.path is None:
            if request.sampling_session_seq_id is None:
                raise CommandRefused("the weights need a path or a sampling_session_seq_id")
            name = sampler_id(row.session, request.sampling_session_seq_id)
            self.tenants.write_unnamed(model, folder)
            sampler = Sampler(name, row.session, row.user, None, folder)
            return Outcome(
                command, json_answer(answer | {"sampling_session_id": name}), sampler=sampler
            )
        path = f"tinker://{model}/{kind}/{request.path or f'{command.seq:06d}'}"
        replaced = self.log.checkpoints(path=path)
        if replaced and not request.overwrite:
            raise CommandRefused(
                "there is a checkpoint of this name",
                found=path, help="choose another name, or pass overwrite=True",
            )  # fmt: skip
        size = self.tenants.write(model, folder, whole=whole)
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        checkpoint = Checkpoint(
            path, model, row.user, kind, folder, size, now, expires, config,
            request.user_metadata or {},
        )  # fmt: skip
        return Outcome(command, json_answer(answer | {"path": path}), checkpoint=checkpoint)

    def _sample(self, commands: Sequence[Command]) -> bool:
        """Draw what was asked of versions for which there is room; False where there is none."""
        asked: list[Asked] = []
        outcomes: list[Outcome] = []
        self._starved = False
        for command in commands:
            try:
                folder = self.log.sampler(command.queue).folder
                key = self.tenants.enter_version(folder, busy=self._busy)
                self._busy.add(key)
                body = self.log.body_of(command)
                asked.append(read_sample(replace(command, body=body), key, self.tenants))
            except NoRoom:
                self._starved = True
                self._denied.add(command.queue)
            except Exception as error:  # noqa: BLE001  (it is the answer)
                outcomes.append(self._failed(command, error))
        tokens = {each.command: len(each.prompt) for each in asked}
        with self._timed(SAMPLE, tokens) as ran:
            outcomes += draw(asked, self.tenants, self._failed)
        ran.tokens = {each.command: each.tokens for each in outcomes if each.command in tokens}
        self._finish(outcomes, ran)
        return bool(asked or outcomes)

    def _between(self) -> None:
        """Run gradients and steps while completions grow, of models that are there already."""
        if (start := time.perf_counter()) < self._next_wave:
            return
        runnable, resident = self.log.runnable(), self.tenants.resident
        asked = {model: own for model, own in runnable.items() if own[0].kind in (FORWARD, STEP)}
        turns = {model: own for model, own in asked.items() if model in resident}
        self._tell(self._denied | asked.keys() - turns.keys())
        if turns:
            with torch.enable_grad():
                self._wave(turns)
        end = time.perf_counter()
        self._next_wave = end + (end - start)

    # Answers.

    def _finish(self, outcomes: Sequence[Outcome], ran: Ran | None = None) -> None:
        """Write answers, and tell who waits for them.

        ran   what was computed
        """
        if not outcomes and not (ran and ran.tokens):
            return
        self.log.finish(outcomes, ran)
        for outcome in outcomes:
            resident = self.tenants.resident.get(outcome.command.queue)
            if resident is not None:
                resident.ran = max(resident.ran, outcome.command.seq)
        for command, seconds in ran.parts().items() if ran else ():
            if (resident := self.tenants.resident.get(command.queue)) is not None:
                resident.since += seconds
        self.finished([outcome.command.number for outcome in outcomes])
        if any(outcome.checkpoint is not None for outcome in outcomes):
            # The folders of those that were replaced.
            self.log.sweep()

    def _failed(self, command: Command, error: Exception) -> Outcome:
        """An error as the answer of its command."""
        mine = not isinstance(error, TloraError)
        if mine:
            logger.error("command %s failed", command.number, exc_info=error)
        text = f"the trainer failed: {type(error).__name__}; see its log" if mine else str(error)
        content = {"error": text, "category": "server" if mine else "user"}
        return Outcome(command, replace(json_answer(content), failed=True))
