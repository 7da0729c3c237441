"""The installed vLLM's engines on a GPU do what preflight says: they start or stop, with the same words.

MOEDOCTOR_PREFLIGHT_TABLE names a Markdown file for the table.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import preflight_engines
import pytest
from checkpoint_headers import ARCHITECTURES, PLANTED, SOUND, Built

from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers
from moedoctor.diagnose.preflight.records import Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]
AT_ONCE = 12
COMMON = (
    *(
        "--max-model-len",
        "128",
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--attention-backend",
        "TRITON_ATTN",
    ),
    *("--kv-cache-memory-bytes", "268435456", "--gpu-memory-utilization", "0.05"),
)
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


def list_starts() -> dict[str, tuple[Built, tuple[str, ...]]]:
    """Return the sound checkpoints and the planted ones that one GPU can be asked for."""
    planted = {
        name: each for name, each in PLANTED.items() if not any("parallel" in flag for flag in each.flags)
    }
    starts: dict[str, tuple[Built, tuple[str, ...]]] = {name: (build(), ()) for name, build in SOUND.items()}
    starts |= {name: (each.built(), each.flags) for name, each in planted.items()}
    for name, (built, flags) in starts.items():
        common = COMMON if "--max-model-len" not in flags else COMMON[2:]
        latent = "kv_lora_rank" in built.config
        words = tuple("TRITON_MLA" if latent and word == "TRITON_ATTN" else word for word in common)
        starts[name] = (built, (*words, *flags))
    return starts


def start_engine(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    script = Path(preflight_engines.__file__)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(folder), *words]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **VARIABLES, "PYTHONPATH": path},
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    return (
        json.loads(lines[-1][7:]) if lines else {"started": False, "error": {"message": ended.stderr[-400:]}}
    )


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]{4,}|\d+", text))


def test_engines_do_what_preflight_says(tmp_path: Path) -> None:
    starts, commands, headers = list_starts(), [], {}
    for name, (built, words) in starts.items():
        folder = preflight_engines.write_values(tmp_path / name, built)
        headers |= read_headers(folder)
        commands.append(ServeCommand((str(folder), *words), VARIABLES))
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    question = Question(torch.cuda.get_device_capability(), memory, 1)
    predicted = dict(zip(starts, ask_release(Release("installed"), commands, question, headers), strict=True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(start_engine, tmp_path / name, words) for name, (_, words) in starts.items()]
        engines = dict(zip(starts, (each.result() for each in asked), strict=True))
    rows = [compare(name, predicted[name], engines, built) for name, (built, _) in starts.items()]
    if table := os.environ.get("MOEDOCTOR_PREFLIGHT_TABLE"):
        Path(table).write_text(format_table(rows, predicted["qwen3-bf16"].versions))
    wrong = [row for row in rows if not row["agrees"]]
    assert len(wrong) <= 0.05 * len(rows), wrong
    silent = {
        row["name"] for row in rows if row["preflight"] == Verdict.WRONG.value and row["tokens_of_sound"]
    }
    assert silent <= {"draft-experts-missing"}  # a draft's mistakes cost speed


def compare(name: str, answer: Any, engines: dict[str, Any], built: Built) -> dict[str, Any]:
    """Return one row: the answer, the engine's, and whether its tokens are those of the sound checkpoint."""
    engine = engines[name]
    message = engine.get("error", {}).get("message", "")
    expected = words_of(answer.findings[0].message) if answer.findings else set()
    common = len(expected & words_of(message)) / max(1, min(len(expected), len(words_of(message))))
    if answer.verdict is Verdict.REFUSED:  # an assert without words has no message
        agrees = not engine["started"] and (common >= 0.5 or not message)
    else:
        agrees = engine["started"] and answer.verdict is not Verdict.CANNOT_SAY
    sound = next(
        (
            engines[f"{each}-{form}"].get("tokens")
            for each, (build, forms) in ARCHITECTURES.items()
            for form in forms
            if SOUND[f"{each}-{form}"]().config == built.config and f"{each}-{form}" != name
        ),
        None,
    )
    same = engine.get("tokens") == sound if sound and engine.get("tokens") and name in PLANTED else None
    return {
        "name": name,
        "preflight": answer.verdict.value,
        "reason": answer.reason[:300],
        "started": engine["started"],
        "error": message[:300],
        "tokens": engine.get("tokens"),
        "agrees": agrees,
        "tokens_of_sound": same,
    }


def format_table(rows: list[dict[str, Any]], versions: Mapping[str, str]) -> str:
    """Return the rows as a page of Markdown."""
    agreed = sum(row["agrees"] for row in rows)
    lines = [
        "# preflight beside engines\n",
        f"{agreed} of {len(rows)} agree: {', '.join(map(' '.join, versions.items()))}.\n",
        "| checkpoint | preflight | engine | its error | tokens of the sound checkpoint | agree |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        tokens = {None: "", True: "the same", False: "others"}[row["tokens_of_sound"]]
        engine = "started" if row["started"] else "stopped"
        error = " ".join(row["error"].split())[:120].replace("|", "/")
        agree = "yes" if row["agrees"] else "**no**"
        cells = (f"`{row['name']}`", row["preflight"], engine, error, tokens, agree)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
