"""Compares recorded calls with the reference, in a process beside the one that serves.

In the serving process a comparison would compete with the model for Python's global interpreter lock.
`python -m moedoctor.trace.call_judge CHECKPOINT` reads capsules without weights from its input, each behind
its length in 8 bytes, and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from moedoctor.processes.ask import make_helper_environment
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.trace.capsule import Capsule, CapsuleError, add_weights, from_bytes, to_bytes
from moedoctor.trace.expert_weights import ExpertFiles

_MODULE = "moedoctor.trace.call_judge"
_THREADS = 4
_SECONDS = 120.0
_NICENESS = 10
"""The engine has a higher priority."""


def is_right(capsule: Capsule) -> bool:
    """Return whether the output of a call with weights is within the bounds of the reference.

    Raises CapsuleError if it cannot be told.
    """
    if capsule.record.weights == "none":
        raise CapsuleError("the checkpoint's weights cannot be read, so nothing can be compared")
    bounds = choose_bounds(capsule.record.activations)
    output = capsule.tensors["output"].float()  # [T, H]
    return any(agree(output, capsule.compute_expected(near), bounds).right for near in (None, output))


class CallJudge:
    """Judges calls of the layers of one checkpoint in a process beside this one."""

    def __init__(self, checkpoint: Path, seconds: float = _SECONDS) -> None:
        """`seconds`: how long a comparison may take; an engine that ends waits for the last one."""
        self._checkpoint = checkpoint
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs. It is ready after some seconds, and calls wait until then."""
        if self._child is not None:
            return
        # In a session of its own an interrupt of the engine does not reach it; it ends with its input.
        self._child = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self._checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_helper_environment(),
            start_new_session=True,
        )

    def is_right(self, capsule: Capsule) -> bool:
        """Return whether a call is right; `capsule` has no weights. Waits, while other threads go on.

        Raises CapsuleError if it cannot be told, or the process has died.
        """
        self.start()
        child, data = self._child, to_bytes(capsule)
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        limit = threading.Timer(self._seconds, child.kill)
        limit.start()
        try:
            child.stdin.write(len(data).to_bytes(8, "little") + data)
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = b""
        late = not limit.is_alive()
        limit.cancel()
        if late or not line:
            self.close()
            why = f"gave no answer within {self._seconds:g} s" if late else f"ended with {child.returncode}"
            raise CapsuleError(f"the process that compares calls {why}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise CapsuleError(answer["error"])
        return bool(answer["right"])

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # the rest of a call that was not read
                    stream.close()


def main(checkpoint: str) -> None:
    """Answer until the input ends."""
    os.nice(_NICENESS)
    torch.set_num_threads(min(_THREADS, torch.get_num_threads()))
    files: ExpertFiles | None = None
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    while length := source.read(8):
        data = source.read(int.from_bytes(length, "little"))
        answer: dict[str, bool | str | None] = {"right": None, "error": None}
        try:
            files = files or ExpertFiles(Path(checkpoint))
            capsule = from_bytes(data)
            read = partial(files.read_tensors, capsule.record.layer, quantization=capsule.record.quantization)
            answer["right"] = is_right(add_weights(capsule, read))
        except CapsuleError as error:
            answer["error"] = str(error)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
