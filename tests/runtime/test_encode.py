"""What becomes of one row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.runtime.encode import encode, encode_pair, targets
from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.rendered import Encoded
from tlora_fx.runtime.chats.renderer import UnlocatedTurnError
from tlora_fx.runtime.data.encoding import TextEncoder, require_readable
from tlora_fx.runtime.data.layout import Format, SampleLayout

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def encoder(
    tokenizer: PreTrainedTokenizerFast, format: Format, *, on_completion: bool = True
) -> TextEncoder:
    """An encoder of columns that have our own names."""
    names = {"prompt-completion": ("prompt", "completion")}.get(format, (format,))
    return TextEncoder(
        tokenizer, SampleLayout(format, {name: name for name in names}, on_completion)
    )


def shown(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> str:
    """The tokens, with those that are trained in brackets."""
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids)
    pairs = zip(tokens, targets(encoded), strict=True)
    return "".join(f"[{token}]" if trained else token for token, trained in pairs)


def test_the_loss_is_on_the_completion_and_its_end(make_tokenizer: Any) -> None:
    """The prompt is read, the completion and the end token are trained."""
    tokenizer = make_tokenizer()
    encoded = encode(encoder(tokenizer, "prompt-completion"), {"prompt": "1+", "completion": "ab"})

    assert shown(tokenizer, encoded) == "1+[a][b][</s>]"


def test_loss_on_all_trains_the_prompt_too(make_tokenizer: Any) -> None:
    """With loss_on: all every token is a target."""
    tokenizer = make_tokenizer()
    whole = encoder(tokenizer, "prompt-completion", on_completion=False)

    encoded = encode(whole, {"prompt": "a", "completion": "b"})
    assert shown(tokenizer, encoded) == "[a][b][</s>]"


def test_a_token_across_the_border_belongs_to_the_completion(make_tokenizer: Any) -> None:
    """Where prompt and completion merge into one token, it is trained and the row is counted."""
    tokenizer = make_tokenizer()
    encoded = encode(encoder(tokenizer, "prompt-completion"), {"prompt": "1=", "completion": "2"})

    assert shown(tokenizer, encoded) == "1[=2][</s>]"
    assert encoded.prefix_differs


def test_an_empty_completion_has_nothing_to_train(make_tokenizer: Any) -> None:
    """An end token alone is no completion."""
    encoded = encode(
        encoder(make_tokenizer(), "prompt-completion"), {"prompt": "a", "completion": ""}
    )

    assert not any(targets(encoded))


@pytest.mark.parametrize("text", ["ab", "<s>ab", "ab</s>", "<s>ab</s>"])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_begin_and_end_stand_once(make_tokenizer: Any, text: str, adds_eos: bool) -> None:
    """Whatever the text and the tokenizer add, there is one begin and one end token."""
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=adds_eos)
    encoded = encode(encoder(tokenizer, "text"), {"text": text})

    assert tokenizer.convert_ids_to_tokens(encoded.ids) == ["<s>", "a", "b", "</s>"]


def test_an_end_that_the_tokenizer_adds_does_not_part_prompt_and_completion(
    make_tokenizer: Any,
) -> None:
    """A tokenizer that ends each text leaves no end token inside a sample."""
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True)
    encoded = encode(encoder(tokenizer, "prompt-completion"), {"prompt": "a", "completion": "b"})

    assert shown(tokenizer, encoded) == "<s>a[b][</s>]"
    assert not encoded.prefix_differs


def test_no_begin_token_is_added_that_the_tokenizer_does_not_add(make_tokenizer: Any) -> None:
    """A tokenizer that has a begin token but does not add it is left alone."""
    tokenizer = make_tokenizer(eos_token=None)
    encoded = encode(encoder(tokenizer, "text"), {"text": "ab"})

    assert shown(tokenizer, encoded) == "[a][b]"


def test_assistant_turns_are_trained_where_the_template_marks_them(
    make_tokenizer: Any, templates: dict[str, str]
) -> None:
    """The marks of the template decide, so that turn headers are not trained."""
    tokenizer = make_tokenizer(templates["marked"])
    encoded = encode(encoder(tokenizer, "messages"), {"messages": CHAT})

    expected = "<|user|>hi<|assistant|>[y][o][</s>]<|user|>more<|assistant|>[n][o][</s>]"
    assert shown(tokenizer, encoded) == expected


def test_unmarked_turns_are_found_by_what_they_add(
    make_tokenizer: Any, templates: dict[str, str]
) -> None:
    """Without marks the same tokens are trained."""
    marked, unmarked = (make_tokenizer(templates[name]) for name in ("marked", "unmarked"))
    expected = encode(encoder(marked, "messages"), {"messages": CHAT})

    assert encode(encoder(unmarked, "messages"), {"messages": CHAT}) == expected


def test_a_template_that_changes_earlier_turns_is_refused(
    make_tokenizer: Any, templates: dict[str, str]
) -> None:
    """Nothing is guessed where the start of a chat is rendered otherwise in the whole."""
    tokenizer = make_tokenizer(templates["shortening"])

    with pytest.raises(UnlocatedTurnError, match="turn 2"):
        encode(encoder(tokenizer, "messages"), {"messages": CHAT})


def test_a_template_that_changes_earlier_turns_trains_all_tokens(
    make_tokenizer: Any, templates: dict[str, str]
) -> None:
    """With loss_on: all no turn has to be found."""
    whole = encoder(make_tokenizer(templates["shortening"]), "messages", on_completion=False)

    assert all(targets(encode(whole, {"messages": CHAT})))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ("hi", "no list"),
        ([{"content": "a"}], "message 1 is no object with a role"),
        ([{"role": "user", "content": [{"text": "a"}]}], "message 1 has no text"),
        ([{"role": "user", "content": 3}], "message 1 has no text"),
        (None, "no value in the column 'messages'"),
    ],
)
def test_malformed_messages_are_told_apart(
    make_tokenizer: Any, templates: dict[str, str], messages: object, reason: str
) -> None:
    """Each way in which messages are wrong has its reason."""
    with pytest.raises(BadRowError, match=reason):
        encode(encoder(make_tokenizer(templates["marked"]), "messages"), {"messages": messages})


def test_a_text_that_is_a_number_is_a_bad_row(make_tokenizer: Any) -> None:
    """Values are never turned into text."""
    with pytest.raises(BadRowError, match="'text' holds int, no text"):
        encode(encoder(make_tokenizer(), "text"), {"text": 3})


COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "input", "output"),
    "preference": ("prompt", "chosen", "rejected"),
}
TEXTS = st.sampled_from(["", "a", "\ud800", "[]", '[{"role": "user", "content": "b"}]'])
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "nobody", 3]),
        "from": st.sampled_from(["human", "gpt"]),
        "content": TEXTS | st.none() | st.just([{"type": "text", "text": "a"}]),
        "value": TEXTS,
        "weight": st.sampled_from([0, 1, 2]),
    },
)
VALUES = TEXTS | st.none() | st.integers(0, 1) | MESSAGES | st.lists(MESSAGES, max_size=2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(format=st.sampled_from([*COLUMNS]), values=st.tuples(VALUES, VALUES, VALUES), chat=...)
def test_what_is_refused_without_a_tokenizer_is_refused_with_one(
    make_tokenizer: Any, templates: dict[str, str], format: Format, values: Any, chat: bool
) -> None:
    """So that telling a row early refuses no row that could be trained."""
    columns = {name: name for name in COLUMNS[format]}
    layout = SampleLayout(format, columns, on_completion=format != "text")
    row = dict(zip(columns, values, strict=False))
    try:
        require_readable(layout, row)
    except BadRowError:
        tokenizer = make_tokenizer(templates["marked"] if chat else None)
        draw = encode_pair if format == "preference" else encode
        with pytest.raises(BadRowError):
            draw(TextEncoder(tokenizer, layout), row)
