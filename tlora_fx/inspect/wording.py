"""Numbers and paths as people read them."""

from __future__ import annotations

from collections.abc import Sequence

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
KINDS = {
    "dora": "DoRA",
    "embedding": "LoRA on an embedding",
    "lora-bias": "LoRA whose B has a bias",
    "saved": "a copy that the job trains",
    "bias": "a bias that the job trains",
    "lora, bias trained": "LoRA, and a bias that the job trains",
}
SHORT_TYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
MANY_VALUES = 3
MANY_RUNS = 6


def scaled(value: float, unit: str = "") -> str:
    """A number with a decimal prefix: "33.8 M", "8.2 kB"."""
    for size, prefix in PREFIXES:
        if value >= size * 0.9995:
            return f"{_digits(value / size)} {prefix}{unit}"
    plain = f"{value:.0f}" if value >= MANY_VALUES or value == int(value) else f"{value:.1f}"
    return f"{plain} {unit}".rstrip()


def counted(value: float) -> str:
    """A number of parameters, where a billion is B: "8.03 B"."""
    return scaled(value).replace("G", "B")


def plural(number: int, noun: str) -> str:
    """A count with its noun: "1 job", "3 jobs", "2 branches"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def listed(values: Sequence[float]) -> str:
    """A few numbers, or the range of many: "8, 16", "2-128"."""
    if len(values) > MANY_VALUES:
        return f"{min(values):.3g}-{max(values):.3g}"
    return ", ".join(f"{value:.3g}" for value in values) or "–"


def cut(text: str, width: int) -> str:
    """A text that is at most this wide."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def runs(numbers: Sequence[int]) -> list[str]:
    """Whole numbers as runs: 0, 1, 2, 5 are "0-2", "5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" for a, b in found]


def layers_label(layers: Sequence[str]) -> str:
    """Layer paths in short: "layers.0-31 ×32", "layers.{0,2,…,30} ×16"."""
    parent = layers[0].rpartition(".")[0].rpartition(".")[2]
    pieces = runs([int(layer.rpartition(".")[2]) for layer in layers])
    if len(pieces) > MANY_RUNS:
        pieces = [*pieces[:2], "…", pieces[-1]]
    inside = pieces[0] if len(pieces) == 1 else "{" + ",".join(pieces) + "}"
    times = f" ×{len(layers)}" if len(layers) > 1 else ""
    return f"{parent}.{inside}{times}"


def without_root(path: str, layers: Sequence[str]) -> str:
    """A path without the name of the module that holds the layers: "embed_tokens"."""
    root = layers[0].rpartition(".")[0].rpartition(".")[0] if layers else ""
    return path.removeprefix(f"{root}.") if root else path


def kind_text(kind: str, reason: str) -> str:
    """Why a branch runs as it is, in a few words: what it is, else what a pass said."""
    return KINDS.get(kind) or reason


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
