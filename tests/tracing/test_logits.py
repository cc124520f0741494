"""What a model may return."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.models import Plain, error_of, hand_written
from tlora_fx.compiler import compile
from tlora_fx.errors import BaseRefused


class Four(Plain):
    """Logits of more than three dimensions."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, 1, S, V]."""
        return super().forward(ids)[:, None]


class Named(Plain):
    """Logits in a dictionary, under another name."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Hidden states and logits."""
        return {"hidden": self.embed(ids), "scores": super().forward(ids)}


@pytest.mark.parametrize(
    ("make", "found"), [(Four, "a tensor of 4 dimensions"), (Named, "found     dict")]
)
def test_what_is_no_row_of_logits_for_each_token_is_refused(make, found):
    """The loss, and whoever compares it, reads one tensor of three dimensions."""
    text = error_of(lambda: compile(hand_written(make(layers=2))), BaseRefused)

    assert found in text


class Skip(Plain):
    """Logits of the last hidden state and of the first."""

    def forward(self, ids: Tensor) -> Tensor:
        """The sum of both."""
        return super().forward(ids) + self.head(self.embed(ids))


def test_logits_of_several_values_are_refused_by_name():
    """The head runs on the last hidden state alone."""
    text = error_of(lambda: compile(hand_written(Skip(layers=2))), BaseRefused)

    assert "from several values" in text
