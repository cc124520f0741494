"""Replay folders: what is needed to run a pass that failed once more, alone.

graph/           the graphs as they were before the pass (graph_file)
before.py        their code, for people
replay.json      pass, pipeline, checks, versions, and packages of passes that are not ours
pipeline.txt     the whole pipeline and the failing pass
buffers.safetensors  the buffers of the base, where numbers were verified
inputs.json      what the graphs take: shapes, types, and sizes while tracing
error.txt        the error with its traceback
"""

from tlora_fx.replay.run import run_replay
from tlora_fx.replay.write import keep_replay, write_replay
from tlora_fx.tools.replay import ForeignPass, Replay, load_replay

__all__ = [
    "ForeignPass",
    "Replay",
    "keep_replay",
    "load_replay",
    "run_replay",
    "write_replay",
]
