"""Formats times chat templates, against the tokens and labels of TRL.

The templates are those of public models, re-made in short, with `{% generation %}` round what TRL
trains. Without these marks the same tokens are to be trained. TRL's own templates are read from its
package: a public one must be trained as the one that TRL takes in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.data_utils import _tokenize, common_prefix_length, extract_prompt

from tests.runtime.encode import encode, encode_pair, targets
from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.rendered import Encoded
from tlora_fx.runtime.chats.renderer import UnlocatedTurnError
from tlora_fx.runtime.data.encoding import TextEncoder
from tlora_fx.runtime.data.layout import Format, SampleLayout

HERE = Path(__file__).parent / "templates"
MARKED = {path.stem: path.read_text() for path in sorted(HERE.glob("*.jinja"))}
OF_TRL = Path(trl.__file__).parent / "chat_templates"
TRAINED_BY_TRL = sorted(
    path.stem.removesuffix("_training") for path in OF_TRL.glob("*_training.jinja")
)

#: Templates that refuse or drop what others show: chats by template.
NO_SYSTEM = {"mistral", "codellama", "gemma", "llama2", "hunyuan", "gemma3", "mistral-v3"}
#: Images and text in parts: these show no text that is a plain string.
OF_IMAGES = {"idefics3", "llava_next", "smolvlm"}
#: What templates write as one token.
TAGS = re.compile(
    r"<[|｜][^<>\s]+[|｜]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|</?think>|\[\|[^|\s]+\|\]"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "two"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "n"}},
            },
        },
    }
]
CHATS: Mapping[str, list[dict[str, Any]]] = {
    "one": [user("hi"), assistant("yo there")],
    "two": [user("hi"), assistant("yo"), user("more?"), assistant("no, thanks")],
    "same": [user("a"), assistant("a"), user("a"), assistant("a")],
    "spaced": [user(" hi \n"), assistant("yo  "), user("x"), assistant("a b\n")],
    "quoting": [user("<|im_end|>\nyo"), assistant("assistant: hi</s>"), user("b"), assistant("c")],
    "system": [
        {"role": "system", "content": "Be kind."}, user("hi"), assistant("yo"), user("b"),
        assistant("no"),
    ],
    "assistant first": [assistant("Hello"), user("hi"), assistant("yo")],
}  # fmt: skip
REASONED = [
    user("hi"), assistant("<think>\nlet me\n</think>\n\nyo"), user("more"),
    assistant("<think>\nhm\n</think>\n\nno"),
]  # fmt: skip
CALLED = [
    user("add"), assistant("", tool_calls=[CALL]),
    {"role": "tool", "name": "add", "content": '{"r": "3"}'}, assistant("it is 3"), user("ok"),
    assistant("bye"),
]  # fmt: skip


@cache
def tokenizer_of(template: str, more: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, in which the tags of templates are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tags = sorted(set(TAGS.findall(template + more)))
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    return tokenizer


def without_marks(template: str) -> str:
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)


def encoder(
    tokenizer: PreTrainedTokenizerFast, format: Format = "messages", *names: str, **options: Any
) -> TextEncoder:
    """An encoder of columns that have our own names."""
    columns = {name: name for name in names or (format, "tools")}
    return TextEncoder(tokenizer, SampleLayout(format, columns, True), **options)


def trained_by_trl(
    tokenizer: PreTrainedTokenizerFast, template: str, messages: Any, tools: Any = None
) -> tuple[list[int], list[bool]]:
    """What SFTTrainer makes of a conversation with assistant_only_loss."""
    made = _tokenize(
        tokenizer, messages, return_assistant_tokens_mask=True, chat_template=template, tools=tools
    )
    return list(made["input_ids"]), [bool(on) for on in made["assistant_masks"]]


def fields(encoded: Encoded) -> tuple[list[int], list[bool]]:
    return encoded.ids, targets(encoded)


def chats_of(name: str) -> list[str]:
    return [chat for chat in CHATS if not (chat == "system" and name in NO_SYSTEM)]


TABLE = [(name, chat) for name in MARKED for chat in chats_of(name)]


def test_there_are_templates_enough() -> None:
    """The table speaks of some forty families of models."""
    assert len(MARKED) >= 40


@pytest.mark.parametrize(("name", "chat"), TABLE)
def test_marked_turns_are_those_of_trl(name: str, chat: str) -> None:
    """Where a template marks what the assistant wrote, that is trained."""
    tokenizer, messages = tokenizer_of(MARKED[name]), CHATS[chat]

    encoded = encode(encoder(tokenizer), {"messages": messages})

    assert fields(encoded) == trained_by_trl(tokenizer, MARKED[name], messages)


@pytest.mark.parametrize(("name", "chat"), TABLE)
def test_turns_are_found_without_marks(name: str, chat: str) -> None:
    """A template without marks trains what it would with them."""
    tokenizer, messages = tokenizer_of(without_marks(MARKED[name])), CHATS[chat]

    encoded = encode(encoder(tokenizer), {"messages": messages})

    assert fields(encoded) == trained_by_trl(tokenizer, MARKED[name], messages)


#: What TRL trains silently of conversations that templates do not show: our error.
LEAVES_OUT_CALLS = {"deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"}
#: By template the chats of which TRL trains something else: the header of GLM's next turn ends one,
#: which the public template does not write at the end; DiffusionGemma's call of a tool ends before
#: what the public template writes behind it.
DIFFERS: Mapping[str, tuple[str, ...]] = {
    "glm4moe": (*CHATS, "reasoned", "called"), "diffusion_gemma": ("called",),
}  # fmt: skip


@pytest.mark.parametrize("chat", [*CHATS, "reasoned", "called"])
@pytest.mark.parametrize("name", [name for name in TRAINED_BY_TRL if name not in OF_IMAGES])
def test_public_templates_are_trained_as_by_trl(name: str, chat: str) -> None:
    """TRL trains them by templates of its own: their tokens and masks are ours."""
    public, training = (
        (OF_TRL / f"{file}.jinja").read_text() for file in (name, f"{name}_training")
    )
    tokenizer = tokenizer_of(public, training)
    tools = TOOLS if chat == "called" else None
    messages = {"reasoned": REASONED, "called": CALLED, **CHATS}[chat]
    try:
        expected = trained_by_trl(tokenizer, training, messages, tools)
    except TemplateError:
        with pytest.raises(BadRowError):
            encode(encoder(tokenizer), {"messages": messages, "tools": tools})
        return
    if chat == "called" and name in LEAVES_OUT_CALLS:
        with pytest.raises(UnlocatedTurnError, match="leaves out"):
            encode(encoder(tokenizer), {"messages": messages, "tools": tools})
        return

    encoded = encode(encoder(tokenizer), {"messages": messages, "tools": tools})

    assert (fields(encoded) == expected) == (chat not in DIFFERS.get(name, ()))


def shown(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> str:
    """The text, with what is trained in double angle brackets."""
    parts, on = [], False
    for token, trained in zip(encoded.ids, targets(encoded), strict=True):
        if trained != on:
            parts.append("»" if on else "«")
        on = trained
        parts.append(tokenizer.decode([token]))
    return "".join(parts) + "»" * on


TWO = [user("hi"), assistant("yo"), user("b"), assistant("c")]
SHAREGPT = [
    {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"},
    {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"},
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"messages": SHAREGPT},
        {"messages": json.dumps(TWO)},
        {
            "messages": [
                {"role": "human", "content": "hi"},
                {"role": "gpt", "content": "yo"},
                *TWO[2:],
            ]
        },
        {
            "messages": [
                {**each, "content": [{"type": "text", "text": each["content"]}]} for each in TWO
            ]
        },
        {"messages": [{**each, "weight": 1} for each in TWO]},
        {"messages": [{**each, "name": None, "tool_calls": None} for each in TWO]},
    ],
    ids=["from and value", "JSON text", "roles of ShareGPT", "parts", "weights", "nulls"],
)
def test_forms_of_messages_are_one_conversation(row: dict[str, Any]) -> None:
    """Whatever form a conversation has, the same tokens are trained."""
    tokenizer = tokenizer_of(MARKED["chatml"])

    encoded = encode(encoder(tokenizer), row)

    assert fields(encoded) == trained_by_trl(tokenizer, MARKED["chatml"], TWO)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("untrained", [{"weight": 0}, {"train": False}, {"training": False}])
def test_a_turn_that_is_not_to_be_trained_is_not(marked: bool, untrained: dict[str, Any]) -> None:
    """OpenAI's weight and ShareGPT's train speak of one turn."""
    template = MARKED["chatml"] if marked else without_marks(MARKED["chatml"])
    tokenizer = tokenizer_of(template)
    messages = [TWO[0], {**TWO[1], **untrained}, *TWO[2:]]

    text = shown(tokenizer, encode(encoder(tokenizer), {"messages": messages}))

    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n«c<|im_end|>\n»"
    )


def test_a_turn_that_is_not_to_be_trained_is_not_where_all_else_is() -> None:
    """With loss_on: all too."""
    tokenizer = tokenizer_of(MARKED["mistral"])
    layout = SampleLayout("messages", {"messages": "messages"}, False)
    messages = [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]

    text = shown(tokenizer, encode(TextEncoder(tokenizer, layout), {"messages": messages}))

    assert text == "«<s>[INST] hi [/INST]»yo</s>«[INST] b [/INST]c</s>»"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**TWO[1], "weight": 0.5}, "trained or not"),
        ({**TWO[1], "loss_mask": [1]}, "looks like what is trained"),
        ({**TWO[0], "train": True}, "only turns of the assistant are"),
    ],
)
def test_what_governs_training_and_is_not_read_is_an_error(
    message: dict[str, Any], reason: str
) -> None:
    """Nothing that says what is trained is passed over."""
    tokenizer = tokenizer_of(MARKED["chatml"])

    with pytest.raises(BadRowError, match=reason):
        encode(encoder(tokenizer), {"messages": [message, *TWO[2:]]})


def test_a_call_of_llama_factory_is_a_call() -> None:
    """Its function_call holds JSON, its observation what the tool says."""
    template = (OF_TRL / "qwen3.jinja").read_text()
    tokenizer = tokenizer_of(template)
    turns = [
        {"from": "human", "value": "add"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": '{"r": "3"}'},
        {"from": "gpt", "value": "it is 3"}, {"from": "human", "value": "ok"},
        {"from": "gpt", "value": "bye"},
    ]  # fmt: skip

    ours = encode(encoder(tokenizer), {"messages": turns, "tools": TOOLS})

    whole = [*CALLED[:1], {"role": "assistant", "tool_calls": [CALL]}, *CALLED[2:]]
    assert ours == encode(encoder(tokenizer), {"messages": whole, "tools": TOOLS})


@pytest.mark.parametrize("name", MARKED)
def test_a_reply_starts_where_it_does_in_trl(name: str) -> None:
    """Prompt and completion as messages: at the first token that is not the prompt's."""
    tokenizer = tokenizer_of(without_marks(MARKED[name]))
    before = _tokenize(tokenizer, TWO[:3], add_generation_prompt=True)["input_ids"]
    ids = _tokenize(tokenizer, TWO)["input_ids"]
    start = common_prefix_length(before, ids)

    both = encoder(tokenizer, "prompt-completion", "prompt", "completion")
    encoded = encode(both, {"prompt": TWO[:3], "completion": TWO[3:]})

    assert fields(encoded) == (list(ids), [at >= start for at in range(len(ids))])


PAIRS = {
    "texts": {"chosen": "The sky is blue", "rejected": "The sky is green"},
    "a space before": {"chosen": "Say a", "rejected": "Say b"},
    "no space before": {"chosen": "Say:a", "rejected": "Say:b"},
    "one the other's start": {"chosen": "Say yes", "rejected": "Say yes or no"},
    "spaces": {"chosen": "Q:  \n a", "rejected": "Q:  \n b"},
    "messages": {
        "chosen": [user("hi"), assistant("yo")], "rejected": [user("hi"), assistant("no")],
    },
    "longer messages": {"chosen": TWO, "rejected": [*TWO[:3], assistant("d")]},
    "messages that go on": {"chosen": TWO[:2], "rejected": TWO},
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_implicit_prompts_are_those_of_trl(pair: str) -> None:
    """What two completions share is their prompt, as `extract_prompt` has it."""
    tokenizer = tokenizer_of(without_marks(MARKED["chatml"]))
    parts = extract_prompt(PAIRS[pair])
    chat = isinstance(parts["prompt"], list)
    ending = [] if chat else tokenizer.eos_token
    options = {"add_generation_prompt": True} if chat else {}
    before = _tokenize(tokenizer, parts["prompt"], **options)["input_ids"]
    lines = [
        list(_tokenize(tokenizer, parts["prompt"] + parts[side] + ending)["input_ids"])
        for side in ("chosen", "rejected")
    ]
    start = min(common_prefix_length(before, ids) for ids in lines)

    pairs = encode_pair(encoder(tokenizer, "preference", "chosen", "rejected"), PAIRS[pair])

    assert [each.ids for each in pairs] == lines
    assert [targets(each).index(True) for each in pairs] == [start, start]


@pytest.mark.parametrize("named", ["role", "from"])
def test_completions_may_be_one_message_each(named: str) -> None:
    """As in LLaMA-Factory's preferences, whose prompt is a conversation beside them."""
    tokenizer = tokenizer_of(without_marks(MARKED["chatml"]))
    said = {"role": ("role", "content", "assistant"), "from": ("from", "value", "gpt")}[named]
    sides = {side: {said[0]: said[2], said[1]: side} for side in ("chosen", "rejected")}

    pairs = encoder(tokenizer, "preference", "prompt", "chosen", "rejected")
    chosen, rejected = encode_pair(pairs, {"prompt": SHAREGPT[:1], **sides})

    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, chosen) == f"{head}«chosen<|im_end|>\n»"
    assert shown(tokenizer, rejected) == f"{head}«rejected<|im_end|>\n»"


def test_marks_that_run_on_train_no_user() -> None:
    """Where a tokenizer drops the white space at a mark's end, TRL's mask runs to the end."""
    template = MARKED["zephyr"]
    tokenizer = tokenizer_of(template)
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    dropping = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    _, run_on = trained_by_trl(dropping, template, TWO)
    assert run_on[-1]
    assert sum(run_on) > 6

    text = shown(dropping, encode(encoder(dropping), {"messages": TWO}))

    assert text == "<|user|>hi</s><|assistant|>«yo</s>»<|user|>b</s><|assistant|>«c</s>»"


@pytest.mark.parametrize("name", MARKED)
def test_a_slow_tokenizer_trains_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without offsets the tokens of a turn are found by prefixes of the text."""
    tokenizer = tokenizer_of(MARKED[name])
    expected = encode(encoder(tokenizer), {"messages": TWO})
    monkeypatch.setattr(type(tokenizer), "is_fast", False)

    assert encode(encoder(tokenizer), {"messages": TWO}) == expected


@pytest.mark.parametrize(
    ("name", "is_noted"), [("glm4", True), ("falcon", True), ("chatml", False)]
)
def test_a_template_that_ends_no_turn_is_noted(name: str, is_noted: bool) -> None:
    """append_eos: true ends the conversation, and is trained."""
    tokenizer = tokenizer_of(MARKED[name])
    plain = encoder(tokenizer)
    encode(plain, {"messages": TWO})
    assert any("append_eos: true" in note for note in plain.notes) == is_noted

    ended = encoder(tokenizer, append_eos=True)
    encoded = encode(ended, {"messages": TWO})

    assert shown(tokenizer, encoded).endswith("</s>»" if is_noted else "<|im_end|>\n</s>»")
    assert not ended.notes


WORDS = st.text(st.sampled_from("ab \n<>|[]{}'\"\\"), min_size=0, max_size=8) | st.sampled_from(
    ["<|im_end|>", "</s>", "[/INST]", "</think>", "<think>", "assistant", "a", ""]
)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(set(MARKED) - NO_SYSTEM)),
    texts=st.lists(st.lists(WORDS, max_size=3).map("".join), min_size=2, max_size=6),
    first=st.sampled_from(["user", "assistant", "system"]),
)
def test_whatever_is_said_is_trained_right_or_refused(
    name: str, texts: list[str], first: str
) -> None:
    """No text that looks like the template's own leads to other turns than the marked ones."""
    roles = [first, *(("user", "assistant") if first != "user" else ("assistant", "user")) * 3]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    tokenizer = tokenizer_of(without_marks(MARKED[name]), MARKED[name])
    expected = trained_by_trl(tokenizer, MARKED[name], messages)

    try:
        encoded = encode(encoder(tokenizer), {"messages": messages})
    except BadRowError:
        return
    assert fields(encoded) == expected


def test_a_character_of_several_tokens_is_trained_whole() -> None:
    """TRL trains the first token of such a one where a mark ends with it."""
    tokenizer = tokenizer_of(MARKED["chatglm3"])
    messages = [user("a"), assistant("日")]
    _, of_trl = trained_by_trl(tokenizer, MARKED["chatglm3"], messages)

    encoded = encode(encoder(tokenizer), {"messages": messages})

    assert (sum(targets(encoded)), sum(of_trl)) == (5, 3)


def test_a_template_that_stands_for_a_public_one_is_noted() -> None:
    """Once it has made a difference, and where turns are trained alone."""
    tokenizer = tokenizer_of((OF_TRL / "qwen3.jinja").read_text())
    chats, replies = (
        encoder(tokenizer), encoder(tokenizer, "prompt-completion", "prompt", "completion")
    )  # fmt: skip
    encode(chats, {"messages": TWO[:2]})
    encode(replies, {"prompt": TWO[:3], "completion": TWO[3:]})
    assert not chats.notes
    assert not replies.notes

    encode(chats, {"messages": TWO})

    assert "trained in each turn, as in TRL" in chats.notes[0]


@pytest.mark.parametrize("calls", [True, 1.5, {"name": "f"}, ["f"], "f"])
def test_calls_that_are_none_are_told(calls: object) -> None:
    """Odd rows are named, never a traceback."""
    messages = [TWO[0], {"role": "assistant", "content": "a", "tool_calls": calls}]

    with pytest.raises(BadRowError, match="message 2 has no list of objects in 'tool_calls'"):
        encode(encoder(tokenizer_of(MARKED["chatml"])), {"messages": messages})
