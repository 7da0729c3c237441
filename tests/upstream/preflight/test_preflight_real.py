"""The installed vLLM is asked: sound checkpoints are no alarm, and planted mistakes are found and named.

MOEDOCTOR_PREFLIGHT_REPORT names a folder for the pages with the answers, such as reports/preflight.
"""

import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_headers import MORE, PLANTED, SINCE, SOUND, Built, Size, deepseek_v3, qwen3, write_headers
from packaging.version import Version
from safetensors.torch import save_file
from scripts_of_tests import load_script

from moedoctor.diagnose.checkpoint.checks.names import TABLE
from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers
from moedoctor.diagnose.preflight.records import StartAnswer, Verdict

pytestmark = pytest.mark.upstream
QUESTION = Question((9, 0), 80 << 30, 8, seconds=3600)
installed = Version(version("vllm")) if find_spec("vllm") else Version("0")
OLD_PYTHON = "type 'array.array' is not subscriptable"
"""FlashInfer 0.6.16, which 0.27.1 requires, stops several GPUs so before Python 3.12."""
NO_CHANNELS = 'assert weight_quant.strategy == "group"'
"""0.33.0 asserts it of all backends but MARLIN, and prefers HUMMING on 9.0: W8A16 by channel stops there."""


def ask(root: Path, starts: dict[str, tuple[Built, tuple[str, ...]]]) -> dict[str, StartAnswer]:
    """Return the answer to each start, all from one child."""
    commands, headers = [], {}
    for name, (built, flags) in starts.items():
        folder = write_headers(root / name, built)
        headers |= read_headers(folder)
        commands.append(ServeCommand((str(folder), *flags), {}))
    answers = ask_release(Release("installed"), commands, QUESTION, headers)
    return dict(zip(starts, answers, strict=True))


def write_page(kind: str, title: str, columns: list[str], rows: list[list[str]], answer: StartAnswer) -> None:
    """Write a table of what a release answered, if a folder for it is named."""
    if folder := os.environ.get("MOEDOCTOR_PREFLIGHT_REPORT"):
        cells = [columns, ["---"] * len(columns), *([each.replace("|", "/") for each in row] for row in rows)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        asked = ", ".join(map(" ".join, answer.versions.items()))
        page = f"# {title}\n\n{asked}; compute capability 9.0, no GPU, no weights\n\n{table}\n"
        Path(folder, f"{kind}-{answer.release}.md").write_text(page)


def test_sound_checkpoints_are_no_alarm(tmp_path: Path) -> None:
    """Ten architectures in the formats that releases have for them, at TP 1, 2 and 8, with EP too."""
    sizes = {"TP 1": ["1"], "TP 2": ["2"], "TP 8": ["8"]}
    sizes |= {f"EP {size}": [size, "--enable-expert-parallel"] for size in ("2", "8")}
    sound = {**SOUND, **MORE}
    starts = {
        f"{name} {size}": (build(), ("--max-model-len", "512", "--tensor-parallel-size", *words))
        for name, build in sound.items()
        for size, words in sizes.items()
    }
    answers = ask(tmp_path, starts)
    wrong = {name: answer.reason for name, answer in answers.items() if answer.verdict is not Verdict.STARTS}
    rows = [[name, *(answers[f"{name} {size}"].verdict.value for size in sizes)] for name in sound]
    title = f"Sound checkpoints: {len(answers) - len(wrong)} of {len(answers)} start"
    reasons = Counter(why.partition(" (")[0] for why in wrong.values())
    rows += [[f"{count} of them: {why}", *[""] * len(sizes)] for why, count in reasons.most_common()]
    write_page("sound", title, ["checkpoint", *sizes], rows, answers["qwen3-bf16 TP 1"])
    # Gemma 4 has no head_dim of its own in transformers 5.2x, which releases before 0.30 do not know.
    newer = tuple(name for name, since in SINCE.items() if installed < Version(since))
    known = "transformers", OLD_PYTHON, NO_CHANNELS
    unexpected = {name: why for name, why in wrong.items() if not any(each in why for each in known)}
    assert [name for name in unexpected if not name.rsplit(" ", 2)[0].endswith(newer)] == [], unexpected


def test_planted_mistakes_are_found_and_named(tmp_path: Path) -> None:
    answers = ask(tmp_path, {name: (each.built(), each.flags) for name, each in PLANTED.items()})
    answers = {name: answer for name, answer in answers.items() if OLD_PYTHON not in answer.reason}
    missed, rows = {}, []
    for name, answer in answers.items():
        text = " ".join([answer.reason, *(f"{each.message} {each.tensor}" for each in answer.findings)])
        if answer.verdict not in (Verdict.REFUSED, Verdict.WRONG) or not re.search(PLANTED[name].names, text):
            missed[name] = answer.reason
        tensor = answer.findings[0].tensor if answer.findings else ""
        is_found = "**no**" if name in missed else "yes"
        rows.append([name, is_found, answer.verdict.value, f"`{tensor}`" * bool(tensor), answer.reason[:160]])
    title = f"Planted mistakes: {len(rows) - len(missed)} of {len(rows)} are found and named"
    columns = ["mistake", "found", "answer", "tensor or layer", "why"]
    write_page("planted", title, columns, rows, answers["expert-missing"])
    # A release may accept a layout that another one refuses.
    assert len(missed) <= 2, missed


def test_each_backend_that_is_left_out_has_the_releases_reason(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m", SOUND["qwen3-fp8-block"]())
    command = ServeCommand((str(folder), "--max-model-len", "512"), {})
    question = replace(QUESTION, post=True)
    (answer,) = ask_release(Release("installed"), [command], question, read_headers(folder))
    assert "after" in {stage.stage for stage in answer.stages}
    assert answer.import_seconds > 0
    assert "not known" not in dict(answer.memory)["weights on the GPU while they are repacked"]
    for kind, other in (("experts", "MARLIN"), ("linear", "MarlinFP8ScaledMMLinearKernel")):
        if kind == "linear" and installed < Version("0.19"):
            continue  # there is no class for each kernel of FP8 in blocks
        reasons = {backend: reason for layers, backend, reason in answer.backends if layers == kind}
        used = {layer.backend for layer in answer.layers if layer.kind == kind and layer.backend}
        assert len(used) == 1
        assert not used & set(reasons)
        assert other in reasons
        assert any("it takes this layer" not in reason for reason in reasons.values())


def test_a_config_alone_has_the_names_of_the_release(tmp_path: Path) -> None:
    made = "qwen3-bf16 deepseek-v3-fp8-block qwen3-next-bf16 mixtral-modelopt-nvfp4 glm4-ct-w4a16"
    folders = [tmp_path / name for name in (*made.split(), "gpt-oss-mxfp4")]
    for folder in folders:
        folder.mkdir()
        folder.joinpath("config.json").write_text(json.dumps(SOUND[folder.name]().config))
    flags = ("--max-model-len", "512", "--tensor-parallel-size", "2")
    commands = [ServeCommand((str(folder), *flags), {}) for folder in folders]
    *answers, unknown = ask_release(Release("installed"), commands, QUESTION, {})
    reasons = [answer.reason for answer in answers]
    assert [why for why in reasons if not re.search(f"own mapping|{OLD_PYTHON}", why)] == []
    assert "cannot be made" in " ".join(unknown.notes) or OLD_PYTHON in unknown.reason
    assert {row.stage: row.outcome for row in unknown.stages}["load"] == "not asked"


LARGE = {
    "30B": (lambda: qwen3("bf16", Size(48, 128, 8, 2048, 768, 32, 4, 128, 151_936)), "1", 40, 2),
    "DeepSeek-V3": (
        lambda: deepseek_v3("fp8-block", Size(61, 256, 8, 7168, 2048, 128, 128, 128, 129_280)), "8", 120, 3,
    ),
}  # fmt: skip
"""Name -> (checkpoint, tensor-parallel size, most seconds, most GiB); two idle cores need far less time."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", LARGE)
def test_large_checkpoints_take_seconds(name: str, tmp_path: Path) -> None:
    """18,867 tensors on one GPU, and 90,000 on two ranks of eight; with the import of vLLM."""
    build, size, seconds, gib = LARGE[name]
    built = build()
    started = time.perf_counter()
    answer = ask(tmp_path, {name: (built, ("--max-model-len", "512", "--tensor-parallel-size", size))})[name]
    took = time.perf_counter() - started
    assert answer.verdict is Verdict.STARTS, answer.reason
    assert took <= seconds, {stage.stage: stage.seconds for stage in answer.stages}
    assert answer.peak_memory <= gib << 30


def write_adapter(folder: Path, *modules: tuple[str, int, int, int]) -> Path:
    """Write an adapter for modules of layer 0 of Qwen3-MoE: (name, columns, rows, experts in one tensor)."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, columns, rows, experts in modules:
        place = f"base_model.model.model.layers.0.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.zeros(8 * experts, columns)
        tensors[f"{place}.lora_B.weight"] = torch.zeros(rows, 8 * experts)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_are_applied_refused_or_left_out(tmp_path: Path) -> None:
    each = [
        [(f"mlp.experts.{expert}.{name}_proj", 256, 1024, 1) for name in ("gate", "up")]
        + [(f"mlp.experts.{expert}.down_proj", 1024, 256, 1)]
        for expert in range(8)
    ]
    attention, stacked = ("self_attn.q_proj", 256, 2048, 1), ("mlp.experts.base_layer", 256, 2048, 8)
    adapters = {
        "attention": ([attention], Verdict.STARTS),
        "every expert": ([module for expert in each for module in expert], Verdict.STARTS),
        "one expert": (each[3], Verdict.REFUSED),
        "a foreign name": ([("mlp.experts.0.linear_1", 256, 1024, 1)], Verdict.REFUSED),
        "stacked": ([stacked, ("mlp.experts", 1024, 256, 8)], Verdict.REFUSED),
        "half of the stacked": ([attention, stacked], Verdict.WRONG),
        "a smaller model's": ([("self_attn.q_proj", 128, 2048, 1)], Verdict.WRONG),
    }
    build = SOUND["qwen3-bf16"]()
    starts = {
        name: (build, ("--max-model-len", "512", "--enable-lora", "--lora-modules", f"a={folder}"))
        for name, (modules, _) in adapters.items()
        for folder in [write_adapter(tmp_path / f"adapter {name}", *modules)]
    }
    answers = ask(tmp_path, starts)
    assert {name: answer.verdict for name, answer in answers.items()} == {
        name: verdict for name, (_, verdict) in adapters.items()
    }
    found = [finding.id for answer in answers.values() for finding in answer.findings]
    assert found == [*["MD029"] * 4, ""]


def test_the_table_of_names_is_what_this_release_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lint` uses it without a vLLM."""
    names = load_script("release/names", monkeypatch)
    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    release, rows = names.ask_rows()
    if not any(release in row["releases"] for row in stored):
        pytest.skip(f"the table has nothing of {release}: make release V={release}")
    assert names.merge_rows(stored, release, rows) == stored
