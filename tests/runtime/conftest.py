"""A tokenizer small enough to read: one token a character, but for one merge."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")

#: Marks what the assistant wrote.
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

#: The same text, without marks.
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

#: Shows only the last assistant turn in full, as templates that hide earlier thinking do.
SHORTENING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and not loop.last %}-{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """A tokenizer of characters, in which '=2' is one token."""

    def make(
        chat_template: str | None = None,
        *,
        adds_bos: bool = False,
        adds_eos: bool = False,
        eos_token: str | None = "</s>",
    ) -> PreTrainedTokenizerFast:
        letters = [*string.ascii_letters, *string.digits, *" =+?.:-\n", "=2"]
        vocab = {token: index for index, token in enumerate([*SPECIAL, *letters])}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[("=", "2")]))
        if adds_bos or adds_eos:
            core.post_processor = processors.TemplateProcessing(
                single=f"{'<s> ' * adds_bos}$A{' </s>' * adds_eos}",
                special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])],
            )
        core.add_special_tokens(list(SPECIAL))
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            bos_token="<s>",
            eos_token=eos_token,
            chat_template=chat_template,
        )

    return make


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates by what they do."""
    return {"marked": MARKED, "unmarked": UNMARKED, "shortening": SHORTENING}
