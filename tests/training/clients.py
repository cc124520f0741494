"""Clients of a command log in one process, and an engine in float64 that they share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.training.cycle import Cycle
from tlora_fx.training.engine import Engine
from tlora_fx.training.log import CommandLog
from tlora_fx.training.messages import _CLASS, canonical_request
from tlora_fx.training.options import EngineOptions
from tlora_fx.training.records import PROTOBUF

VOCABULARY = 259
#: Tokens of a micro-batch where a test asks for small ones: an eighth of what a trainer has.
SMALL_MICRO_TOKENS = 256
#: Of the small base; gone with the process.
_FOLDER = TemporaryDirectory(prefix="tlora-fx-training-")


@dataclass(frozen=True, slots=True)
class ServedOptions(EngineOptions):
    """On a base of whose linears kernels can compute each: all sizes are multiples of 16."""

    def spec(self):
        from transformers import LlamaConfig

        folder = self.folder / "served"
        LlamaConfig(
            vocab_size=272, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip
        return BaseSpec(config=folder, dtype=self.dtype or "bfloat16", seed=3)


@cache
def engine(residents=4):
    """One engine of a process; what trained on it before has left when a cycle begins."""
    return Engine(EngineOptions(Path(_FOLDER.name), dtype="float64", residents=residents))


def cycle_of(folder, own=None, parked_bytes=None, **how):
    """A cycle of a log, on an empty engine: what a trainer that was killed begins with."""
    own = own or engine()
    for member in list(own.step.members.values()):
        own.step.release(member.job.name)
    cycle = Cycle(CommandLog(folder), own, **how)
    if parked_bytes is not None:
        cycle.tenants.parked_bytes = parked_bytes
    return cycle


def datum(tokens, targets=None, **inputs):
    """Tokens, their targets (by default the next ones), and numbers by name."""
    if targets is None:
        tokens, targets = tokens[:-1], tokens[1:]
    return {"tokens": list(tokens), "target_tokens": np.array(targets, "<i8"), **inputs}


def request(model, seq, data, loss="cross_entropy", options=None, *, forward_only=False):
    """The body of a forward_backward."""
    message = _CLASS["ForwardBackwardRequest"](
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    for name, value in (options or {}).items():
        entry = message.loss_fn_config_v2.add(key=name)
        setattr(entry.value, "text" if isinstance(value, str) else "number", value)
    for each in data:
        own = message.data.add()
        own.model_input.add().encoded_text.tokens = np.array(each["tokens"], "<i4").tobytes()
        for name, values in each.items():
            if name == "tokens":
                continue
            whole = name == "target_tokens"
            tensor = own.loss_fn_inputs.add(key=name).value
            tensor.dense = np.array(values, "<i8" if whole else "<f4").tobytes()
            tensor.dtype = 2 if whole else 1
            tensor.shape.append(len(values))
    return canonical_request(message.SerializeToString())[2]


def read_forward(body):
    """Metrics, and each datum's log-probabilities."""
    message = _CLASS["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    [record] = message.loss_fn_outputs
    [field] = record.fields
    ends = np.frombuffer(field.value.offsets, "<i8") // 4
    data = np.frombuffer(field.value.data, "<f4")
    logprobs = [data[start:end] for start, end in pairwise(ends)]
    return {each.key: each.value for each in message.metrics}, logprobs


@dataclass
class Client:
    """One model of a log; each request is appended under the next number."""

    log: CommandLog
    user: str = "ada"
    config: dict = field(default_factory=lambda: {"rank": 4, "seed": 1})
    session: str = ""
    load: str = ""
    optimizer: bool = True
    optimizer_config: dict = field(default_factory=lambda: {"type": "adamw"})

    def __post_init__(self):
        self.session = self.session or self.log.open_session(self.user, {})
        self.model, self.seq = f"{self.session}:train:0", 0
        if self.load:
            self.created, _ = self.log.create(
                self.user, self.session, 0, "load_model",
                json.dumps({"path": self.load, "optimizer": self.optimizer}).encode(),
            )  # fmt: skip
            return
        body = {
            "session_id": self.session, "model_seq_id": 0, "base_model": "tlora-fx/small",
            "lora_config": self.config, "optimizer_config": self.optimizer_config,
        }  # fmt: skip
        self.created, _ = self.log.create(
            self.user, self.session, 0, "create_model", json.dumps(body).encode()
        )

    def forward_backward(self, data, loss="cross_entropy", options=None, **how):
        self.seq += 1
        body = request(self.model, self.seq, data, loss, options, **how)
        return self.log.append(self.user, self.model, self.seq, "forward_backward", body)

    def send(self, kind, **fields):
        self.seq += 1
        body = {"model_id": self.model, "seq_id": self.seq, **fields}
        return self.log.append(self.user, self.model, self.seq, kind, json.dumps(body).encode())

    def optim_step(self, **adam):
        return self.send("optim_step", adam_params=adam)

    def sample(self, sampler, seq, tokens, **fields):
        params = fields.pop("params", {"max_tokens": 4, "seed": 3, "stop": []})
        body = {
            "prompt": {"chunks": [{"tokens": tokens}]}, "sampling_params": params,
            "sampling_session_id": sampler, "seq_id": seq, **fields,
        }  # fmt: skip
        return self.log.append(self.user, sampler, seq, "sample", json.dumps(body).encode())

    def result(self, number):
        """What a future came to: JSON, or metrics and log-probabilities."""
        answer = self.log.answer(self.user, number)
        assert answer is not None
        if answer.media == PROTOBUF:
            return read_forward(answer.body)
        return json.loads(answer.body)


def run_all(cycle):
    """Run cycles until nothing is left."""
    while cycle.run():
        pass
