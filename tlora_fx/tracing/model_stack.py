"""Which lines of model code made a traced node: the stack that torch notes with it, found sooner.

For each node torch looks at every frame of the process and reads its line, then drops all that
called the trace. Here only frames within the trace are looked at, and only lines that are kept are
read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from types import FrameType
from unittest.mock import patch

from torch.fx import proxy


class _TraceStack:
    """Frames within a trace, in place of torch's CapturedTraceback.

    outermost   the frame that traces
    """

    outermost: FrameType | None = None

    def __init__(self, frames: list[tuple[str, int, str]]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls) -> _TraceStack:
        """The frames between the caller and the one that traces."""
        frames: list[tuple[str, int, str]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not cls.outermost:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return cls(frames[::-1])

    def summary(self) -> StackSummary:
        """As Python has them, the outermost first."""
        frames = [FrameSummary(*frame, lookup_line=False) for frame in self.frames]
        return StackSummary.from_list(frames)


@contextmanager
def stacks_of_model() -> Iterator[None]:
    """Let traced nodes note the frames that the block calls, and none around it."""
    # The frames above: this function, contextlib's, and the block's.
    stack = type("TraceStack", (_TraceStack,), {"outermost": sys._getframe(2)})
    with patch.object(proxy, "CapturedTraceback", stack):
        yield
