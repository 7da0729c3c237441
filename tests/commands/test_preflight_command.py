"""`moedoctor preflight`: the answer first, and an exit code that CI can use. The release is a stub."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoint_headers import Size, qwen3, write_headers

from moedoctor import environment
from moedoctor.cli import main
from moedoctor.commands import hooks
from moedoctor.diagnose.preflight import ask
from moedoctor.processes.ask import Ended
from moedoctor.reporters.findings import find_field

NOTES = {"answered": ["answered in their place: a"], "gone": ["torch:cuda.x"]}
ENVIRONMENT = {"versions": {"vllm": "0.33.0"}, "unsatisfied": [], "seconds": 1.0, **NOTES}


def make_reply(command: Mapping[str, Any]) -> dict[str, Any]:
    """Answer as a release that loads everything at size 1, and stops at any other."""
    words = command["words"]
    size = int(words[words.index("--tensor-parallel-size") + 1]) if "--tensor-parallel-size" in words else 1
    config = {"architecture": "Qwen3MoeForCausalLM", "tensor_parallel": size, "expert_parallel": False}
    layers = [{"kind": "experts", "method": "Fp8MoEMethod", "backend": "TRITON", "count": 2}]
    seconds = {"groups": 0.1, "build": 0.2, "load": 0.3}
    row: dict[str, Any] = {"rank": 0, "seconds": seconds, "bytes": 1 << 30, "layers": layers}
    row["loaded"] = {"holes": [], "cast": []}
    row["kv"] = {"tokens": 1000, "refused": ""}
    if "--max-model-len" in words:
        row["kv"] = {"tokens": None, "refused": "no room", "left": -1 << 30, "weights": 2 << 30}
    if size > 1:
        error = {"stage": "load", "type": "ValueError", "message": "64 is not divisible by 128"}
        frame = {"at": ["vllm/linear.py:7"], "line": "", "last_module": "vllm", "cause": ""}
        row["error"] = {**error, **frame, "tensor": "q_proj"}
    return {"words": words, "seconds": {"arguments": 0.1, "config": 0.1}, "ranks": [row], "config": config}


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a package vllm, and a child that answers as `make_reply` says."""
    package = tmp_path / "0.33.0" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

    def run_module(module: str, request: Any, **options: Any) -> Ended:
        assert options["environ"]["CUDA_VISIBLE_DEVICES"] == ""
        answers = (ENVIRONMENT, *(make_reply(command) for command in request["commands"]))
        return Ended(answers, 0, "", 1.0, 600.0)

    monkeypatch.setattr(ask, "run_module", run_module)
    return package.parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_headers(tmp_path / "model", qwen3(size=Size(layers=1)))


def call(release: Path, model: Path, *words: str, options: tuple[str, ...] = ()) -> int:
    named = ("preflight", "--sm", "9.0", "--memory", "80", "--wheel", str(release))
    return main([*named, *options, "--", "vllm", "serve", str(model), *words])


def test_the_answer_comes_first(release: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(release, model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "starts: yes" in lines[1]
    assert call(release, model, "--tensor-parallel-size", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "starts: no: 0.33.0 stops, rank 0: ValueError: 64 is not divisible by 128" in " ".join(lines[1:4])
    assert any("--sizes 8" in line for line in lines[:6])
    assert sum("is not divisible" in line for line in lines) == 1
    assert call(release, model, "--max-model-len", "9", options=("--fail-on", "warning")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "starts: with more memory: rank 0: the weights take 2.00 GiB, and vLLM may use 1.00" in lines[1]


def test_each_size_is_an_item_and_a_report_says_what_to_do(release, model, capsys) -> None:
    call(release, model, options=("--sizes", "2", "--format", "junit"))
    names = re.findall(r'testcase .*name="([^"]+)"', capsys.readouterr().out)
    assert len({name for name in names if name.startswith("vLLM 0.33.0: vllm serve ")}) == len(names) == 5
    call(release, model, options=("--sizes", "2", "--format", "github"))
    assert "starts: yes · vLLM 0.33.0 · 0 findings · 2 of 4 others start" in capsys.readouterr().out
    call(release, model, "--tensor-parallel-size", "2", options=("--format", "markdown"))
    assert "**To do:** Choose other sizes: --sizes 8" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["", "config.json", "pack.headers.zip"])
def test_a_finding_is_in_the_file_that_was_given(part, release, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["preflight", "headers", "model", "-o", "model/pack.headers.zip"])
    call(release, Path("model", part), "--tensor-parallel-size", "2", options=("--format", "sarif"))
    (found,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    file = found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert file == f"model/{part or 'config.json'}"


def test_a_machine_that_is_asked_about_has_its_own_gpus(release, model, monkeypatch, capsys):
    machine = {"capability": "12.0", "gpus": [{"memory_bytes": 32 << 30}]}
    monkeypatch.setattr(environment, "collect", lambda: machine)
    named = ("preflight", "--wheel", str(release), "--format", "json")
    for options, count, size in (((), 1, 32), (("--sm", "9.0"), 8, 80), (("--gpus", "2"), 2, 32)):
        assert main([*named, *options, "--", "vllm", "serve", str(model)]) == 0
        gpu = json.loads(capsys.readouterr().out)["gpu"]
        assert (gpu["count"], gpu["memory_gib"]) == (count, size)


def test_every_size_has_an_answer(release: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(release, model, options=("--sizes", "10", "--format", "json")) == 0
    document = json.loads(capsys.readouterr().out)
    first, *others = document["answers"]
    sizes = [answer["words"][answer["words"].index("--tensor-parallel-size") + 1] for answer in others]
    assert sizes == [str(size) for size in (1, 2, 3, 4, 5, 6, 7, 8, 10) for _ in range(2)]
    assert [answer["verdict"] for answer in (first, *others)] == ["starts"] * 3 + ["refused"] * 16
    assert document["answers"][0]["notes"] == [
        "answered in their place: a",
        "not in this release, so not answered in its place: torch:cuda.x",
    ]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 1),
        (("--fail-on", "wrong"), 0),
        (("--ignore", "q_proj"), 0),
        (("--ignore", "refused"), 0),
        (("--ignore", "k_proj"), 1),
    ],
)
def test_what_fails_is_chosen(release: Path, model: Path, options: tuple[str, ...], code: int) -> None:
    assert call(release, model, "--tensor-parallel-size", "2", options=options) == code


def test_every_release_decides_the_exit_code_and_no_other_size_does(release, model, monkeypatch, capsys):
    other = release.parent / "0.30.0"
    other.joinpath("vllm").mkdir(parents=True)
    other.joinpath("vllm", "__init__.py").touch()

    def run_module(module: str, request: Any, **options: Any) -> Ended:
        is_other = str(other) in options["environ"]["PYTHONPATH"]
        version, size = ("0.30.0", "2") if is_other else ("0.33.0", "1")
        answers = [
            make_reply({"words": [*each["words"], "--tensor-parallel-size", size]}) | {"words": each["words"]}
            for each in request["commands"]
        ]
        return Ended(({"versions": {"vllm": version}}, *answers), 0, "", 1.0, 600.0)

    assert call(release, model, options=("--sizes", "2")) == 0
    monkeypatch.setattr(ask, "run_module", run_module)
    assert call(release, model, options=("--releases", str(other))) == 1
    assert "0.30.0 stops, rank 0: ValueError" in capsys.readouterr().err


def test_a_hook_asks_about_each_file_of_headers(release, model, tmp_path, monkeypatch):
    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, main(words[3:]))

    monkeypatch.setattr(hooks.subprocess, "run", run)
    packs = [str(tmp_path / f"{name}.headers.zip") for name in "ab"]
    for pack in packs:
        assert main(["preflight", "headers", str(model), "-o", pack]) == 0
    options = ["preflight", "--sm=9.0", f"--wheel={release}"]
    assert hooks.main([*options, *packs]) == 0
    assert hooks.main([*options, "--", "--tensor-parallel-size", "2", *packs]) == 1


def test_a_release_that_dies_cannot_say(release, model, monkeypatch, capsys):
    for code, text in ((-9, "killed by SIGKILL"), (None, "no answer within 600 s\nNext: Give it more time")):
        ended = Ended((ENVIRONMENT,), code, "", 1.0, 600.0)
        monkeypatch.setattr(ask, "run_module", lambda *_, ended=ended, **__: ended)
        assert call(release, model) == 2
        assert f"cannot say: 0.33.0 could not be asked: {text}" in capsys.readouterr().out


def test_foreign_code_does_not_run_unless_it_is_asked_for(release, model, monkeypatch, capsys):
    asked: list[Any] = []

    def run_module(module: str, request: Any, **options: Any) -> Ended:
        asked.append(request["commands"][0]["words"])
        return Ended((ENVIRONMENT, make_reply(request["commands"][0])), 0, "", 1.0, 600.0)

    monkeypatch.setattr(ask, "run_module", run_module)
    assert call(release, model, "--trust-remote-code") == 0
    assert "was left out" in capsys.readouterr().out
    assert call(release, model, "--trust-remote-code", options=("--trust-remote-code",)) == 0
    assert ["--trust-remote-code" in words for words in asked] == [False, True]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("num_experts does not fit", 3),
        ("Unknown quantization method: x", 4),
        ("Model architectures ['X'] are not supported", 2),
        ("nothing of it", None),
    ],
)
def test_a_finding_has_its_line_of_the_config(tmp_path: Path, message: str, line: int | None) -> None:
    config = {"architectures": ["X"], "num_experts": 8, "quantization_config": {}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config, indent=1).replace('[\n  "X"\n ]', '["X"]'))
    assert find_field(str(file), message) == line
    assert find_field(str(tmp_path / "none.json"), message) is None
