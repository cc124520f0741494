"""Protobuf messages of the Tinker API that the service reads or writes.

They are described by field numbers, so that a server needs no client's package. Fields that the
service does not read are left out; what a client sends in them is skipped, as protobuf does. Maps
are lists of entries, which is the same on the wire, and can be sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tlora_fx.errors import CommandRefused, RequestRefused

_PACKAGE = "tlora_fx.training"
#: By message: its fields, each `NUMBER NAME TYPE`, with `*` behind the type of a list.
_MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "EncodedText": "1 tokens bytes",
    "NamedTensor": "1 key string, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs NamedTensor*",
    "ConfigValue": "1 number double, 2 text string",
    "NamedNumber": "1 key string, 2 value double",
    "NamedValue": "1 key string, 2 value ConfigValue",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config NamedNumber*, 6 forward_only bool, 7 loss_fn_config_v2 NamedValue*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "NamedBatch": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields NamedBatch*, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, "
    "3 metrics NamedNumber*",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes",
}
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_FLOAT32 = 1
#: Of a request; while these are read, a second or two, nobody else's requests run. The client sends
#: 1,024 at a time.
MAX_DATA = 1 << 16
STOP_REASONS = {"stop": 0, "length": 1}


def _classes() -> dict[str, Any]:
    """A class for each message."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, called, kind = text.split()
            each = message.field.add(name=called, number=int(number))
            each.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _MESSAGES:
                each.type, each.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                each.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASS = _classes()


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to learn from.

    tokens   input ids, int64 [n]
    inputs   what the loss reads, by name; a number each token, [n]
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A request for gradients, or for the forward alone.

    loss      name of the loss
    options   of the loss; texts too
    """

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def canonical_request(body: bytes) -> tuple[str, int, bytes]:
    """The model and number of a forward_backward, and bytes that equal requests have alike.

    raises   RequestRefused where it is none
    """
    message = _parsed("ForwardBackwardRequest", body)
    for datum in message.data:
        datum.loss_fn_inputs.sort(key=lambda entry: entry.key)
    for options in (message.loss_fn_config, message.loss_fn_config_v2):
        options.sort(key=lambda entry: entry.key)
    return message.model_id, message.seq_id, message.SerializeToString(deterministic=True)


def _parsed(name: str, body: bytes) -> Any:
    message = _CLASS[name]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestRefused(f"the body is no {name}", reason=error) from error
    return message


def read_request(body: bytes) -> ForwardBackward:
    """A request as it came.

    raises   CommandRefused for data that the service does not train on
    """
    message = _parsed("ForwardBackwardRequest", body)
    if len(message.data) > MAX_DATA:
        raise CommandRefused(
            "the request has too much data", expected=f"{MAX_DATA} data at most",
            found=len(message.data), help="send it in several requests: gradients add up",
        )  # fmt: skip
    data = [_datum(number, each) for number, each in enumerate(message.data)]
    # Clients write numbers twice, for older servers.
    options: dict[str, float | str] = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        value = each.value
        options[each.key] = value.text or value.number
    return ForwardBackward(data, message.loss_fn, options, message.forward_only)


def _datum(number: int, message: Any) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise CommandRefused(
            f"datum {number} has an image or audio", help="send tokens: types.EncodedTextChunk"
        )
    chunks = [
        _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"tokens of datum {number}")
        for chunk in message.model_input
    ]
    tokens = np.concatenate(chunks) if chunks else np.empty(0)
    inputs = {
        each.key: _tensor(f"{each.key} of datum {number}", each.value)
        for each in message.loss_fn_inputs
    }
    return Datum(tokens.astype(np.int64), inputs)


def _tensor(what: str, message: Any) -> np.ndarray:
    if message.HasField("sparse_csr") or len(message.shape) > 1:
        raise CommandRefused(
            f"{what} is sparse, or has several numbers a token",
            expected="a dense tensor of one dimension",
            found=f"shape {list(message.shape)}",
        )
    if message.dtype not in _DTYPES:
        raise CommandRefused(f"{what} has an unknown dtype", expected="float32, int64")
    return _numbers(message.dense, _DTYPES[message.dtype], what)


def _numbers(content: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise CommandRefused(f"{what} end inside a number")
    return np.frombuffer(content, dtype)


def forward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a forward_backward.

    logprobs   of each datum's targets, [n]
    metrics    names end in how those of several requests are added up, such as `loss:sum`
    """
    sizes = np.cumsum([0, *(4 * len(each) for each in logprobs)], dtype="<i8")
    data = b"".join(np.asarray(each, "<f4").tobytes() for each in logprobs)
    tensor = _CLASS["BatchedTensor"](data=data, offsets=sizes.tobytes(), dtype=_FLOAT32)
    record = _CLASS["ArrayRecord"](
        fields=[_CLASS["NamedBatch"](key="logprobs", value=tensor)], num_datums=len(logprobs)
    )
    numbers = [_CLASS["NamedNumber"](key=name, value=each) for name, each in metrics.items()]
    output = _CLASS["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=numbers
    )
    return bytes(output.SerializeToString())


def sample_output(
    sequences: Iterable[tuple[Sequence[int], Sequence[float], str]],
    prompt_logprobs: np.ndarray | None = None,
) -> bytes:
    """The answer to a sample.

    sequences         tokens, their log-probabilities, and "stop" or "length"
    prompt_logprobs   of each token of the prompt, NaN where there is none
    """
    drawn = [
        _CLASS["SampledSequence"](
            stop_reason=STOP_REASONS[reason],
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
        for tokens, logprobs, reason in sequences
    ]
    output = _CLASS["SampleResponse"](sequences=drawn)
    if prompt_logprobs is not None:
        output.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(output.SerializeToString())
