"""Two programs take turns on one machine: each runs some steps when it is told to, and says what they took.

One line of JSON each way, over standard input and a copy of standard output: `{"steps": 4}` in, the `Turn` of those
steps out; an empty line or the end of input asks the program to stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What some training steps in a row took."""

    steps: int
    samples: int
    tokens: int
    """Response tokens generated and trained on."""
    wall: float
    """Seconds."""
    cpu: float
    """Processor seconds of the program; of its main process alone."""


class Side:
    """The program's end: call `step_begins` at the same place of every step, for good once `stopped`."""

    def __init__(self) -> None:
        # What libraries print must not get between the lines of the protocol.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.stopped = False
        self._left = 0
        self._steps = self._samples = self._tokens = 0
        self._wall = self._cpu = 0.0

    def count(self, samples: int, tokens: int) -> None:
        """Add what was generated in the step that runs."""
        self._samples += samples
        self._tokens += tokens

    def step_begins(self) -> None:
        """End a turn whose steps are done and wait for the next; sets `stopped` if there is none."""
        if self._left > 0:
            self._left -= 1
            if self._left > 0:
                return
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._say(asdict(Turn(self._steps, self._samples, self._tokens, wall, cpu)))
        else:
            self._say({"ready": True})
        line = sys.stdin.readline().strip()
        if not line:
            self.stopped = True
            return
        self._steps = self._left = json.loads(line)["steps"]
        self._samples = self._tokens = 0
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def _say(self, message: dict[str, object]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()
