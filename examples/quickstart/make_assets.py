"""Make the quickstart's base model and data: a config, a tokenizer, three small data sets.

All of it is made by this file from templates and a seed, so it is the project's own. Running it
again writes the same bytes. The base has no weights: `jobs.yaml` gives the seed to draw them from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
SEED = 20
ROWS = 200
VOCABULARY = 512
PAD, BOS, EOS, USER, ASSISTANT = "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BOS, EOS, USER, ASSISTANT]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": SPECIAL.index(PAD),
    "bos_token_id": SPECIAL.index(BOS),
    "eos_token_id": SPECIAL.index(EOS),
    "dtype": "float32",
}

# What the assistant says lies between the generation marks: only that is trained.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|assistant|>' }}
{%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}
{{- '<|user|>' + message['content'] }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""

NAMES = ["Ada", "Ben", "Chloe", "Dmitri", "Esi", "Farid", "Greta", "Hiro", "Ines", "Jonas"]
THINGS = ["apples", "marbles", "stamps", "pencils", "shells", "tickets", "cards", "buttons"]
CITIES = ["Lyon", "Quito", "Oslo", "Accra", "Kyoto", "Porto", "Tartu", "Perth"]
TRADES = ["baker", "nurse", "pilot", "tailor", "welder", "teacher", "farmer", "printer"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black"]

GREETINGS = ["Hello!", "Hi there.", "Good morning.", "Good evening."]
TALK = [
    ("My name is {name}.", "Nice to meet you, {name}."),
    ("I live in {city}.", "{city} is a fine place to live."),
    ("I work as a {trade}.", "A {trade} is always needed."),
    ("I like the colour {colour}.", "{colour} suits you well."),
    ("I collect {thing}.", "How many {thing} do you have by now?"),
]


def word_problems(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Arithmetic in a sentence, as prompt and completion."""
    for _ in range(ROWS):
        name, other = rng.sample(NAMES, 2)
        thing, first, second = rng.choice(THINGS), rng.randint(10, 60), rng.randint(2, 9)
        asks, sign, result = rng.choice(
            [
                (f"{other} gives {name} {second} more", "+", first + second),
                (f"{name} gives {second} of them to {other}", "-", first - second),
                (f"{other} has {second} times as many", "*", first * second),
            ]
        )
        who = other if sign == "*" else name
        yield {
            "prompt": f"{name} has {first} {thing}. {asks}. How many {thing} has {who} now?\n",
            "completion": f"{first} {sign} {second} = {result}. The answer is {result}.",
        }


def small_talk(rng: random.Random) -> Iterator[dict[str, Any]]:
    """A chat of one to three turns, as messages."""
    for _ in range(ROWS):
        words = {
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "trade": rng.choice(TRADES),
            "colour": rng.choice(COLOURS),
            "thing": rng.choice(THINGS),
        }
        messages = []
        greeting = rng.choice(GREETINGS) + " "
        for says, answers in rng.sample(TALK, rng.randint(1, 3)):
            messages.append({"role": "user", "content": greeting + says.format(**words)})
            answer = answers.format(**words)
            messages.append({"role": "assistant", "content": answer[0].upper() + answer[1:]})
            greeting = ""
        yield {"messages": messages}


def records(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Keys and values, one a line, as text."""
    for number in range(ROWS):
        fields = {
            "id": f"{number:04d}",
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "trade": rng.choice(TRADES),
            "colour": rng.choice(COLOURS),
            "items": f"{rng.randint(1, 40)} {rng.choice(THINGS)}",
        }
        kept = [key for key in fields if key == "id" or rng.random() < 0.8]
        yield {"text": "".join(f"{key}: {fields[key]}\n" for key in kept)}


DATA: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "word-problems": word_problems,
    "small-talk": small_talk,
    "records": records,
}


def texts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every text of a data set, for the tokenizer to learn from."""
    for row in rows:
        messages = row.get("messages", [])
        yield from (message["content"] for message in messages)
        yield from (row[key] for key in ("prompt", "completion", "text") if key in row)


def train_tokenizer(corpus: list[str]) -> Tokenizer:
    """A byte-level BPE over the three data sets that sets a beginning-of-sequence token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    """Write JSON that reads well and is the same each time."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_base(folder: Path, corpus: list[str]) -> None:
    """Write config, tokenizer and chat template, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "padding_side": "right",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main(folder: Path = HERE) -> None:
    """Write base/ and data/ below a folder."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    corpus: list[str] = []
    for number, (name, make) in enumerate(DATA.items()):
        rows = list(make(random.Random(SEED + number)))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        corpus.extend(texts(rows))
    write_base(folder / "base", corpus)


if __name__ == "__main__":
    main()
