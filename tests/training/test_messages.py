"""Messages as the Tinker SDK 0.38 writes them, and as it reads them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.clients import read_forward, request
from tlora_fx.errors import CommandRefused, RequestRefused
from tlora_fx.training import messages
from tlora_fx.training.messages import (
    _CLASS,
    canonical_request,
    forward_output,
    read_request,
    sample_output,
)

#: What `forward_backward_request_to_proto` of the SDK made of one datum for "ppo".
WRITTEN = bytes.fromhex(
    "0a0a73313a747261696e3a3010031a8e010a0c0a0a0a0805000000060000000a080a060a040700000012210a0a"
    "616476616e746167657312130a0c0000803f0000003f000080bf1801220103121f0a086c6f6770726f62731213"
    "0a0c000080bf000020c000000000180122010312300a0d7461726765745f746f6b656e73121f0a180600000000"
    "000000070000000000000008000000000000001802220103220370706f2a1d0a12636c69705f6c6f775f746872"
    "6573686f6c6411666666666666e63f30013a1f0a12636c69705f6c6f775f7468726573686f6c64120909666666"
    "666666e63f"
)


def test_a_request_of_the_client_is_read():
    read = read_request(WRITTEN)

    assert canonical_request(WRITTEN)[:2] == ("s1:train:0", 3)
    assert (read.loss, read.forward_only) == ("ppo", True)
    assert read.options == {"clip_low_threshold": 0.7}
    [datum] = read.data
    assert datum.tokens.tolist() == [5, 6, 7]
    assert {name: each.tolist() for name, each in datum.inputs.items()} == {
        "target_tokens": [6, 7, 8], "logprobs": [-1.0, -2.5, 0.0], "advantages": [1.0, 0.5, -1.0],
    }  # fmt: skip


def test_bytes_of_equal_requests_are_equal():
    """Also of one that was read and written again; nothing that is read is lost."""
    once = canonical_request(WRITTEN)[2]
    assert canonical_request(once)[2] == once
    assert read_request(once).options == read_request(WRITTEN).options


def test_answers_have_the_bytes_that_the_client_reads():
    """Offsets in bytes, int64; float32 numbers; NaN where a prompt has no log-probability."""
    body = forward_output([np.array([-1.0, -2.0]), np.array([-3.0])], {"loss:sum": 6.0})
    metrics, logprobs = read_forward(body)
    assert metrics == {"loss:sum": 6.0}
    assert [each.tolist() for each in logprobs] == [[-1.0, -2.0], [-3.0]]
    assert b"\x08logprobs" in body
    assert np.array([0, 8, 12], "<i8").tobytes() in body

    body = sample_output([([5, 6], [-1.0, -2.0], "length")], np.array([np.nan, -1.5]))
    message = _CLASS["SampleResponse"]()
    message.ParseFromString(body)
    assert message.sequences[0].tokens == np.array([5, 6], "<i4").tobytes()
    assert message.sequences[0].stop_reason == 1
    assert message.prompt_logprobs == np.array([np.nan, -1.5], "<f4").tobytes()


def changed(**fields):
    """The body of a request whose first tensor, chunk or option is another."""
    message = _CLASS["ForwardBackwardRequest"]()
    message.ParseFromString(request("m", 1, [{"tokens": [5], "target_tokens": [6]}]))
    tensor = message.data[0].loss_fn_inputs[0].value
    if "shape" in fields:
        tensor.shape[:] = fields["shape"]
    if "dtype" in fields:
        tensor.dtype = fields["dtype"]
    if "sparse" in fields:
        tensor.sparse_csr.values = b""
    if "dense" in fields:
        tensor.dense = fields["dense"]
    if "image" in fields:
        message.data[0].model_input.add().image = b""
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shape": [1, 1]}, "several numbers a token"),
        ({"sparse": True}, "is sparse"),
        ({"dtype": 4}, "unknown dtype"),
        ({"dense": b"123"}, "end inside a number"),
        ({"image": True}, "image or audio"),
    ],
)
def test_what_the_service_does_not_train_on_is_refused_by_name(fields, text):
    with pytest.raises(CommandRefused, match=text):
        read_request(changed(**fields))


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])
def test_what_is_no_message_is_refused(body):
    with pytest.raises(RequestRefused, match="no ForwardBackwardRequest"):
        canonical_request(body)


def test_a_request_of_too_many_data_is_refused_before_they_are_read(monkeypatch):
    """Others wait while they are read."""
    monkeypatch.setattr(messages, "MAX_DATA", 2)
    data = [{"tokens": [5], "target_tokens": [6]}]

    assert len(read_request(request("s:train:0", 1, data * 2)).data) == 2
    monkeypatch.setattr(messages, "_datum", None)
    with pytest.raises(CommandRefused, match="too much data"):
        read_request(request("s:train:0", 1, data * 3))
