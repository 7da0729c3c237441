"""Ten thousand simulated nodes: a real report of this machine, replayed with a few odd ones."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

_NODES = 10_000
_MOST_BYTES = 10**9
_MEASURED = """
import json, pathlib, resource, sys, time
started = time.process_time()
from moedoctor.cli import main
code = main(sys.argv[2:])
used, seconds = resource.getrusage(resource.RUSAGE_SELF), time.process_time() - started
for path in pathlib.Path(sys.argv[1]).iterdir():
    json.loads(path.read_bytes())
print(used.ru_maxrss * 1024, seconds, time.process_time() - started - seconds, file=sys.stderr)
sys.exit(code)
"""


def _report(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moedoctor", *arguments, "--format", "json"]
    report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return report


# `most_reads`: times what `json` needs to read the reports, which no comparison can save; 11 and 3.5 usually.
@pytest.mark.parametrize(
    ("arguments", "most_reads"),
    [(("check",), 25), (("run", "nan_routing", "--subject", "fixed", "--subject", "faulty"), 7)],
)
def test_ten_thousand_nodes_take_little_more_than_reading_and_little_memory(
    arguments: tuple[str, ...], most_reads: int, tmp_path: Path
) -> None:
    usual = _report(*arguments)
    usual["environment"].update(vllm="0.33.0", flashinfer="0.7.2.post1", driver="580.95", gpu="NVIDIA H200")
    usual["environment"]["gpus"] = [{"name": "NVIDIA H200", "capability": "9.0", "visible": True}] * 8
    odd = {}
    old = ("flashinfer", "0.6.6")
    for node, (key, value) in {17: old, 4040: old, 77: ("driver", "570")}.items():
        odd[node] = copy.deepcopy(usual)
        odd[node]["environment"][key] = value
    odd[17].setdefault("findings", []).append({"id": "MD011", "title": "rows"})
    folder = tmp_path / "reports"
    folder.mkdir()
    for node in range(_NODES):
        report = odd.get(node, usual)
        own = {
            **report["environment"],
            "env": {**report["environment"]["env"], "VLLM_PORT": str(20_000 + node)},
        }
        (folder / f"node-{node:05d}.json").write_text(json.dumps({**report, "environment": own}))
    options = ["--from-reports", str(folder), "--format", "json", "--show-hosts"]
    command = [sys.executable, "-c", _MEASURED, str(folder), "fleet", arguments[0], *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    document = json.loads(done.stdout)
    used, seconds, reading = map(float, done.stderr.splitlines()[-1].split())
    size = len(json.dumps(usual))
    print(f"{_NODES} reports of {size} bytes: {seconds:.1f} s, reading {reading:.1f} s, {used / 1e6:.0f} MB")
    assert sorted(group["nodes"] for group in document["groups"][1:]) == [
        ["node-00017"],
        ["node-00077"],
        ["node-04040"],
    ]
    assert document["individual"] == {"VLLM_PORT": _NODES}
    assert len(document["nodes"]) == _NODES
    assert done.returncode == 1
    assert seconds < most_reads * reading
    assert used < _MOST_BYTES
