"""`moedoctor bench --engine` as a command: refusals, the report, and `show`."""

from __future__ import annotations

import json
from pathlib import Path

import engine_stub
import pytest

from moedoctor import cli, environment


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return folder


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine"], "0 models given; expected one: --model FOLDER"),
        (["--engine", "--model", "qwen3-30b-a3b"], "expected a folder with config.json"),
        (["--engine", "--cache"], "--engine and --cache are different benchmarks"),
        (["--fixes", "offload"], "belong to --engine"),
        (["--engine", "--model", "MODEL", "--moe-backend", "a b"], "expected names of vLLM's --moe-backend"),
        (
            ["--engine", "--model", "MODEL", "--fixes", "nonsense"],
            "--fixes nonsense: expected some of backend",
        ),
        (["--engine", "--model", "MODEL", "--fixes", "offload+x"], "--fixes offload+x: expected some of"),
        (["--engine", "--model", "MODEL", "--arguments", "{"], "expected JSON, such as"),
        (["--engine", "--model", "MODEL", "--arguments", "[1]"], "expected a JSON object"),
        (["--engine", "--model", "MODEL"], "expected a GPU and an installed vLLM"),
    ],
)
def test_wrong_usage_and_a_machine_without_a_gpu_are_one_line(
    model: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {**environment.collect(), "gpu": None, "gpus": [], "vllm": None}
    monkeypatch.setattr(environment, "collect", lambda: facts)
    assert bench(*[str(model) if text == "MODEL" else text for text in arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert output.out == ""


def test_the_report_is_stored_and_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"gpu": "a GPU", "capability": "9.0", "gpus": [], "vllm": "0.21.0", "torch_cuda": "13.0"}
    monkeypatch.setattr(environment, "collect", lambda: facts)
    stored = tmp_path / "report.json"
    arguments = ["--engine", "--model", str(model), "--moe-backend", "marlin,wrong"]
    assert bench(*arguments, "--format", "json", "-o", str(stored)) == 1
    summary = capsys.readouterr().err
    assert "batch 8: marlin, fix none" in summary
    assert "2 wrong" in summary
    rows = json.loads(stored.read_text())["bench"]["engines"]["rows"]
    assert [(row["moe_backend"], row["batch"], "wrong" in row) for row in rows] == [
        ("marlin", 1, False),
        ("marlin", 8, False),
        ("wrong", 1, True),
        ("wrong", 8, True),
    ]
    assert cli.main(["show", str(stored), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert "is not among the reference's" in shown
    assert "tokens per second" in shown
    assert "more than 1% of the steps, up to the first token that differs, have a logprob" in shown
    older = json.loads(stored.read_text())
    del older["bench"]["engines"]["max_far"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert cli.main(["show", str(tmp_path / "older.json"), "--format", "markdown"]) == 0
    assert "prefers its own token by more than 1 in logprob at the first token" in capsys.readouterr().out
    damaged = json.loads(stored.read_text())
    del damaged["bench"]["engines"]["rows"]
    stored.write_text(json.dumps(damaged))
    assert cli.main(["show", str(stored)]) == 2
    assert "rows" in capsys.readouterr().err
