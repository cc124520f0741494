"""Tools of pass authors: match by pattern, and rewrite so that graphs stay whole.

Patterns (building.py) say why they do not fit (matching.py). Rewriting helpers keep shapes, tags
and provenance, and count as rewrites that a bisection may hold back (rewriter.py, outlining.py).
"""

from tlora_fx.ir.graph import arguments_of
from tlora_fx.rewriting.building import (
    add,
    anything,
    call,
    constant,
    either,
    mul,
    pattern_of,
    read_by,
    shaped,
    stored,
    typed,
    uncast,
    where,
)
from tlora_fx.rewriting.matching import Match, Miss, find, match, nearest_match
from tlora_fx.rewriting.outlining import OutlinedGraph, inline_block, outline, outline_block
from tlora_fx.rewriting.patterns import Pattern
from tlora_fx.rewriting.rewriter import Maker, Rewriter, RewriteRule, rewrite_greedily

__all__ = [
    "Maker",
    "Match",
    "Miss",
    "OutlinedGraph",
    "Pattern",
    "RewriteRule",
    "Rewriter",
    "add",
    "anything",
    "arguments_of",
    "call",
    "constant",
    "either",
    "find",
    "inline_block",
    "match",
    "mul",
    "nearest_match",
    "outline",
    "outline_block",
    "pattern_of",
    "read_by",
    "rewrite_greedily",
    "shaped",
    "stored",
    "typed",
    "uncast",
    "where",
]
