"""A process with the NaN trace in a stub of vLLM, which ends as vLLM's own do; a script for `test_nan_exit`.

    exiting_trace.py FOLDER_OF_THE_STUB HOW

`run`: this process runs a step. `fork`, `spawn`: a child does, and ends as the engine does at SIGTERM.
`inherit`: this process runs a step, and a fork of it none.
"""

from __future__ import annotations

import multiprocessing
import os
import sys


def work(stub: str, run: bool, apply: bool) -> None:
    print(f"started {os.getpid()}", flush=True)
    sys.path.insert(0, stub)
    from moedoctor.upstream.plugin import nan_trace
    from tests.upstream.plugin import nan_stub

    if apply:
        nan_trace.apply("0.21.0")
    if run:
        nan_stub.step(nan_stub.Model(leftover=float("nan")))


def child(stub: str, run: bool, apply: bool) -> None:
    work(stub, run, apply)
    raise SystemExit


if __name__ == "__main__":
    folder, how = sys.argv[1:]
    work(folder, run=how in ("run", "inherit"), apply=True)
    if how != "run":
        context = multiprocessing.get_context("spawn" if how == "spawn" else "fork")
        again = how in ("spawn", "fork again")
        process = context.Process(target=child, args=(folder, how != "inherit", again))
        process.start()
        process.join()
