"""The installed vLLM's engines on GPUs do what preflight says: they start or stop, with the same words.

MOEDOCTOR_PREFLIGHT_TABLE names a Markdown file for the table, MOEDOCTOR_PREFLIGHT_SECONDS how long engines
may begin. An engine that did not begin has no row.
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
from moedoctor.diagnose.preflight.records import StartAnswer, Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]
COMMON = (
    *("--max-model-len", "128", "--enforce-eager", "--skip-tokenizer-init"),
    *("--attention-backend", "TRITON_ATTN"),
    *("--kv-cache-memory-bytes", "268435456", "--gpu-memory-utilization", "0.05"),
)
TWO = ("--tensor-parallel-size", "2", "--disable-custom-all-reduce")
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
STAGES = (("draft", r"spec_decode/"), ("load", r"in load_weights\b"), ("build", r"in initialize_model\b"))
"""Stage -> what a traceback has if the engine stopped there."""
SAME_TOKENS = {
    "draft-experts-missing",  # a draft's mistakes cost speed
    "nvfp4-no-global-scale",  # vLLM takes the gate's for both halves, and warns
}
VERDICTS = {Verdict.REFUSED: "refused", Verdict.WRONG: "wrong", Verdict.CANNOT_SAY: "cannot say: {}"}
Starts = dict[str, tuple[Built, tuple[str, ...]]]


def list_starts(flags: tuple[str, ...], sound_flags: tuple[str, ...] = ()) -> Starts:
    """Return the sound checkpoints and the planted ones that have no sizes of their own, with these flags."""
    starts: Starts = {name: (build(), (*flags, *sound_flags)) for name, build in SOUND.items()}
    for name, each in PLANTED.items():
        if not any("parallel" in flag for flag in each.flags):
            starts[name] = each.built(), (*flags, *each.flags)
    for name, (built, given) in starts.items():
        common = COMMON if "--max-model-len" not in given else COMMON[2:]
        latent = "kv_lora_rank" in built.config
        words = tuple("TRITON_MLA" if latent and word == "TRITON_ATTN" else word for word in common)
        starts[name] = (built, (*words, *given))
    return starts


def start_engines(root: Path, starts: Starts, at_once: int) -> dict[str, Any]:
    """Return what each engine answered, by name; nothing of those that did not begin."""
    file = root / "starts.json"
    file.write_text(json.dumps({str(root / name): words for name, (_, words) in starts.items()}))
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    seconds = os.environ.get("MOEDOCTOR_PREFLIGHT_SECONDS", "1200")
    command = [sys.executable, preflight_engines.__file__, str(file), str(at_once), seconds]
    subprocess.run(command, check=True, env={**os.environ, **VARIABLES, "PYTHONPATH": path})
    answers = {name: root / name / "answer.json" for name in starts}
    return {name: json.loads(file.read_text()) for name, file in answers.items() if file.exists()}


def ask_preflight(root: Path, starts: Starts, question: Question) -> dict[str, StartAnswer]:
    headers = {}
    for name in starts:
        headers |= read_headers(root / name)
    commands = [ServeCommand((str(root / name), *words), VARIABLES) for name, (_, words) in starts.items()]
    answers = ask_release(Release("installed"), commands, question, headers)
    return dict(zip(starts, answers, strict=True))


def judge_engines(root: Path, starts: Starts, gpus: int, title: str) -> None:
    """Start the engines while preflight is asked, write the table, and compare."""
    import torch

    for name, (built, _) in starts.items():
        preflight_engines.write_values(root / name, built)
    memory = torch.cuda.get_device_properties(0).total_memory
    question = Question(torch.cuda.get_device_capability(), memory, gpus, seconds=1200)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_preflight, root, starts, question)
        engines = start_engines(root, starts, max(1, (os.cpu_count() or 1) // gpus))
        predicted = asked.result()
    rows = [compare(name, predicted[name], engines, starts[name][0]) for name in starts if name in engines]
    if table := os.environ.get("MOEDOCTOR_PREFLIGHT_TABLE"):
        file = Path(table)
        page = format_table(title, rows, len(starts), predicted["qwen3-bf16"].versions)
        (file if gpus == 1 else file.with_stem(f"{file.stem}_tp{gpus}")).write_text(page)
    wrong = [row for row in rows if not row["agrees"]]
    assert rows
    assert len(wrong) <= 0.05 * len(rows), wrong
    assert {row["name"] for row in rows if row["preflight"] == "wrong" and row["same_tokens"]} <= SAME_TOKENS


def test_engines_do_what_preflight_says(tmp_path: Path) -> None:
    judge_engines(tmp_path, list_starts(()), 1, "preflight beside engines")


def test_engines_on_two_gpus_do_what_preflight_says(tmp_path: Path) -> None:
    """Sound checkpoints share experts by expert parallelism, planted ones by tensor parallelism."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    starts = list_starts(TWO, ("--enable-expert-parallel",))
    judge_engines(tmp_path, starts, 2, "preflight beside engines on two GPUs")


def compare(name: str, answer: StartAnswer, engines: dict[str, Any], built: Built) -> dict[str, Any]:
    """Return one row: the answer, the engine's, and whether its tokens are those of the sound checkpoint."""
    engine = engines[name]
    stage = engine["stage"] or next((s for s, part in STAGES if re.search(part, engine["text"])), "")
    refusal = next((each for each in answer.findings if each.rule == "refused"), None)
    same_stage = same_words = not engine["started"] and refusal is not None
    if refusal is not None:
        same_stage &= stage in {each.stage for each in answer.stages if each.outcome == "stopped"}
        expected = set(re.findall(r"[A-Za-z_]{4,}|\d+", refusal.message))
        file, _, line = refusal.source.rpartition(":")
        common = expected & set(re.findall(r"[A-Za-z_]{4,}|\d+", engine["text"]))
        # An assert without words has its line.
        same_words &= len(common) >= 0.8 * len(expected) or f'{file}", line {line},' in engine["text"]
    agrees = same_stage and same_words
    if answer.verdict in (Verdict.STARTS, Verdict.WRONG):
        agrees = engine["started"]
    made = (f"{each}-{form}" for each, (_, forms) in ARCHITECTURES.items() for form in forms)
    alike = (each for each in made if each != name and SOUND[each]().config == built.config)
    sound = engines.get(next(alike, ""), {}).get("tokens")
    tokens = engine.get("tokens")
    errors = re.findall(r"^(?:.*\] )?(\w+(?:Error|Exception|Exit): .+)", engine["text"], re.MULTILINE)
    return {
        "name": name,
        "preflight": VERDICTS.get(answer.verdict, answer.verdict.value).format(answer.reason[:200]),
        "stage": f"{stage}" if same_stage or not refusal else f"{stage}, not the same",
        "started": engine["started"],
        "error": errors[0] if errors and not engine["stage"] else engine["text"],
        "agrees": agrees,
        "same_tokens": tokens == sound if sound and tokens and name in PLANTED else None,
    }


def format_table(title: str, rows: list[dict[str, Any]], starts: int, versions: Mapping[str, str]) -> str:
    """Return the rows as a page of Markdown."""
    agreed = sum(row["agrees"] for row in rows)
    missing = f" {starts - len(rows)} more were not run." if starts > len(rows) else ""
    lines = [
        f"# {title}\n",
        f"{agreed} of {len(rows)} agree: {', '.join(map(' '.join, versions.items()))}.{missing}\n",
        "| checkpoint | preflight | engine | stops in | its error | tokens of the sound checkpoint | agree |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tokens = {None: "", True: "the same", False: "others"}[row["same_tokens"]]
        engine = "started" if row["started"] else "stopped"
        error = "" if row["started"] else " ".join(row["error"].split())[:120].replace("|", "/")
        agree = "yes" if row["agrees"] else "**no**"
        cells = (f"`{row['name']}`", row["preflight"], engine, row["stage"], error, tokens, agree)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
