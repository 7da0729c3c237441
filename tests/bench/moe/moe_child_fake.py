"""Replaces the child of `moedoctor.bench.moe.run`: dies, hangs or answers, depending on the model's name."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from moedoctor.processes.ask import answer


def respond(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "roofline" not in request:
        if request["device"] == "broken":
            sys.exit("no such device")
        yield {"event": "roofline", "bytes_per_second": 1e9, "flops": {"bf16": 1e12}}
        return
    for index, task in enumerate(request["tasks"]):
        yield {"event": "task", "index": index}
        head = {"backend": task["variant"]["name"], "quantization": task["variant"]["quantization"]}
        row = {"event": "row", "time_us": 1.0, "model": task["model"], **head}
        what, _, at = task["model"].partition(" at ")
        if what == "dies" and not at:
            yield row | {"tokens": 1}
            os.abort()
        if what == "dies first":
            os.abort()
        if what == "raises" and not at:
            yield {"event": "failed", "index": index, "reason": "ValueError: no"}
            continue
        for tokens in task["tokens"]:
            yield {"event": "point", "tokens": tokens}
            if at and tokens == int(at) and what.startswith("raises"):
                yield {"event": "failed", "index": index, "tokens": tokens, "reason": f"RuntimeError: {what}"}
                if "CUDA" in what:
                    sys.exit(1)
                continue
            if at and tokens == int(at):
                time.sleep(60 if what == "hangs" else 0)
                os.abort()
            yield row | {"tokens": tokens}
    yield {"event": "end"}


if __name__ == "__main__":
    answer(respond)
