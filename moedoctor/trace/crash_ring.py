"""Saves what goes into MoE calls so that it is still there when the process dies.

`CrashRing` writes to memory that it shares with a watcher process (`moedoctor.trace.crash_watcher`). The
watcher writes capsules of the last calls if the process ends without `finish`, or `finish` was told an error.
Two files without names, which the kernel keeps as long as a process has them open, hold the memory of the
rings and notes: a line of JSON for each layer, with its place in the memory, and one for the end.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moedoctor.kernels.device_guard import has_kernels, interprets
from moedoctor.kernels.host_address import pin
from moedoctor.kernels.kept_rows import MoeInput, SavedCalls
from moedoctor.processes.ask import make_helper_environment, open_unnamed_file
from moedoctor.processes.files import make_folder
from moedoctor.trace.call_keeper import FIRST_IN_GRAPH, is_capturing
from moedoctor.trace.capsule import Record
from moedoctor.trace.protect import protect

PLACES = 2
"""Calls of a layer that are saved."""
_MOST_ROWS = 1024
_MOST_BYTES = 8 << 20
"""Of a call; tokens beyond are left out."""
_WATCHER = "moedoctor.trace.crash_watcher"


@dataclass(frozen=True)
class Place:
    """The place of a layer's ring in the shared memory, and the sizes of its tensors."""

    offset: int
    rows: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    """Of x, such as ``bfloat16``."""

    def list_tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, type and shape of each tensor of `SavedCalls`, in their order in the memory."""
        ring = (PLACES, self.rows)
        yield "header", torch.int64, (PLACES, 6)
        yield "x", getattr(torch, self.dtype), (*ring, self.hidden)
        yield "ids", torch.int32, (*ring, self.top_k)
        yield "weights", torch.float32, (*ring, self.top_k)
        yield "logits", torch.float32, (*ring, self.experts)

    def count_row_bytes(self) -> int:
        """Return the bytes of a token."""
        x: torch.dtype = getattr(torch, self.dtype)
        return self.hidden * x.itemsize + 8 * self.top_k + 4 * self.experts

    def count_bytes(self) -> int:
        """Return its bytes, whole pages."""
        size = sum(
            _align(torch.Size(shape).numel() * dtype.itemsize) for _, dtype, shape in self.list_tensors()
        )
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def view(self, memory: mmap.mmap) -> SavedCalls:
        """Return the tensors in `memory`, which begins at the offset."""
        views, start = {}, 0
        for name, dtype, shape in self.list_tensors():
            count = torch.Size(shape).numel()
            views[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
            start += _align(count * dtype.itemsize)
        return SavedCalls(**views)


@dataclass
class CrashRing:
    """Saves the inputs of the calls of one process."""

    folder: Path
    """The folder of the watcher's capsules."""
    max_bytes: int
    warn: Callable[[str], None] = lambda line: None
    """Takes one line that says what is not recorded, and why."""
    whole: bool = False
    """True if calls may have more tokens than the first."""
    blocking: bool | None = None
    """True if memory could not be pinned, so that each call waits for its copies; None before the first."""
    stopped: bool = False
    """True if no more calls are saved."""
    _layers: list[tuple[Record, Path | None]] = field(default_factory=list)
    _saved: dict[int, SavedCalls | None] = field(default_factory=dict)
    """Layer -> its ring; None if its calls do not fit."""
    _memory: Any = None
    _notes: Any = None
    _step: torch.Tensor | None = None
    _steps: int = 0
    _alive: list[Any] = field(default_factory=list)

    def add(self, record: Record, checkpoint: Path | None) -> int:
        """Return the number of a layer; the watcher reads its weights from the folder `checkpoint`."""
        self._layers.append((record, checkpoint))
        return len(self._layers) - 1

    @protect
    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        if self._step is not None:
            self._step.add_(1)

    @protect
    def save(self, layer: int, call: MoeInput) -> None:
        """Save what goes into a call, before it begins."""
        try:
            saved = self._saved[layer] if layer in self._saved else self._make(layer, call)
            if saved is None:
                return
            if not self.blocking:
                from moedoctor.kernels.save_call import launch_save

                assert self._step is not None
                launch_save(saved, self._step, call)
            elif not is_capturing(call.x):
                saved.save_on_host(self._steps, call)
        except ValueError as error:
            self._saved[layer] = None
            self.warn(f"{self._layers[layer][0].layer} is no longer watched: {error}")

    def stop(self, reason: str) -> None:
        """Save no more calls; should the process die later, their capsules say why they are the last."""
        self.stopped = True
        self.warn(f"no more calls are watched: {reason}")
        if self._notes is not None:
            with contextlib.suppress(OSError):
                self._note({"stopped": reason})

    def finish(self, error: str | None = None) -> None:
        """End the recording: the watcher writes nothing unless there was an `error`."""
        if self._notes is not None:
            self._note({"end": error})

    # --- Inside -------------------------------------------------------------------------------------------

    def _make(self, layer: int, call: MoeInput) -> SavedCalls:
        if is_capturing(call.x):
            raise ValueError(FIRST_IN_GRAPH)
        if self._memory is None:
            self._start(call.x)
        record, checkpoint = self._layers[layer]
        offset, hidden = os.fstat(self._memory.fileno()).st_size, call.x.shape[-1]
        dtype = str(call.x.dtype).removeprefix("torch.")
        top_k = record.top_k if call.ids is None else call.ids.shape[-1]
        experts = record.experts if call.logits is None else call.logits.shape[-1]
        sizes = (hidden, top_k, experts, dtype)
        most = _MOST_BYTES // Place(0, 1, *sizes).count_row_bytes()
        # The first call of an engine has the most tokens: vLLM measures memory with it.
        rows = max(1, min(_MOST_ROWS if self.whole else len(call.x), _MOST_ROWS, most))
        place = Place(offset, rows, *sizes)
        os.ftruncate(self._memory.fileno(), offset + place.count_bytes())
        memory = mmap.mmap(self._memory.fileno(), place.count_bytes(), offset=offset)
        self._alive.append(memory)
        with torch.inference_mode(False):
            saved = place.view(memory)
            saved.ids.fill_(-1)
            saved.header.fill_(-1)
        if not self.blocking:
            self.blocking = not pin(saved.header, place.count_bytes(), call.x.device)
        given = (call.x, call.ids, call.weights, call.logits)
        self._note(
            {
                "place": asdict(place),
                "record": record.model_dump_json(),
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "row_bytes": [0 if part is None else part.shape[-1] * part.element_size() for part in given],
            }
        )
        self._saved[layer] = saved
        return saved

    def _start(self, x: torch.Tensor) -> None:
        """Make the memory and start the watcher."""
        self._memory, self._notes = open_unnamed_file(), open_unnamed_file()
        self.blocking = not (has_kernels(x.device) or interprets())
        with torch.inference_mode(False):
            self._step = torch.full((1,), self._steps, dtype=torch.int32, device=x.device)
        make_folder(self.folder)
        files = (self._memory.fileno(), self._notes.fileno())
        request = [*(str(file) for file in files), str(os.getpid()), str(self.max_bytes), str(self.folder)]
        command = [sys.executable, "-m", _WATCHER, *request]
        subprocess.run(command, pass_fds=files, env=make_helper_environment(), check=True, timeout=60)

    def _note(self, note: dict[str, Any]) -> None:
        os.write(self._notes.fileno(), (json.dumps(note) + "\n").encode())


def _align(size: int) -> int:
    return -(-size // 64) * 64
