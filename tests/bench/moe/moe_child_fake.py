"""Stands in for `moedoctor.bench.moe.child`: dies, hangs or answers as the model's name says."""

from __future__ import annotations

import json
import os
import sys
import time

with open(sys.argv[1], encoding="utf-8") as file:
    request = json.load(file)


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


if "roofline" not in request:
    if request["device"] == "broken":
        sys.exit("no such device")
    say(event="roofline", bytes_per_second=1e9, flops={"bf16": 1e12})
    sys.exit(0)
for index, task in enumerate(request["tasks"]):
    say(event="task", index=index)
    head = {"backend": task["variant"]["name"], "quantization": task["variant"]["quantization"]}
    if task["model"] == "dies":
        say(event="row", tokens=1, time_us=1.0, model=task["model"], **head)
        sys.stdout.write('{"event": "row", "tok')
        sys.stdout.flush()
        os.abort()
    what, _, at = task["model"].partition(" at ")
    if task["model"] == "dies first":
        os.abort()
    if at:
        for tokens in task["tokens"]:
            say(event="point", tokens=tokens)
            if tokens == int(at) and what.startswith("raises"):
                say(event="failed", index=index, tokens=tokens, reason=f"RuntimeError: {what}")
                if "CUDA" in what:
                    sys.exit(1)
                continue
            if tokens == int(at):
                time.sleep(60 if what == "hangs" else 0)
                os.abort()
            say(event="row", tokens=tokens, time_us=1.0, model=task["model"], **head)
        continue
    if task["model"] == "hangs":
        time.sleep(60)
    if task["model"] == "raises":
        say(event="failed", index=index, reason="ValueError: no")
        continue
    for tokens in task["tokens"]:
        say(event="point", tokens=tokens)
        say(event="row", tokens=tokens, time_us=1.0, model=task["model"], **head)
say(event="end")
