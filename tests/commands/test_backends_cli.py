"""`moedoctor backends` as a command: options, the command after ``--``, exit codes, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FLASHINFER_"))}


def moedoctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moedoctor", "backends", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**HERE, **environ},
    )


def test_every_option_reaches_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--sm", "10.0", "--scheme", "fp8-block", "--release", "0.21.0", "--ep", "--dp"]
    options += ["--activation", "silu", "--backend", "DEEPGEMM", "--no-ask", "--format", "json"]
    ended = moedoctor(*options, "-o", str(file))
    assert (ended.returncode, ended.stdout) == (0, "")
    report = json.loads(file.read_text(encoding="utf-8"))
    asked = [report[name] for name in ("release", "capability", "scheme", "parallel", "activation")]
    assert asked == ["0.21.0", "10.0", "fp8-block", "dp+ep", "silu"]
    assert report["request"]["how"] == "--moe-backend deep_gemm"
    assert report["moedoctor"]


@pytest.mark.parametrize(
    ("line", "environ", "code", "expected"),
    [
        (["--moe-backend", "marlin"], {}, 0, "MARLIN is selected (--moe-backend marlin)"),
        (["--moe_backend=MARLIN"], {}, 0, "MARLIN is selected (--moe-backend marlin)"),
        (["--moe-backend", "marlyn"], {}, 1, "use --moe-backend marlin"),
        (["--moe-backnd", "marlin"], {}, 1, "use --moe-backend marlin"),
        ([], {"VLLM_NVFP4_MOE_BACKEND": "MARLIN"}, 1, "use --moe-backend marlin"),
        (["-h"], {}, 0, "FLASHINFER_CUTLASS is selected (automatic)"),  # the server's own flag, not ours
    ],
)
def test_a_server_is_judged_by_its_command_line_and_variables(
    line: list[str], environ: dict[str, str], code: int, expected: str
) -> None:
    options = ["--sm", "12.0", "--release", "0.21.0", "--no-ask"]
    ended = moedoctor(*options, "--", "vllm", "serve", "m", *line, **environ)
    assert (ended.returncode, expected in ended.stdout) == (code, True), ended.stdout + ended.stderr


def test_bad_input_is_exit_2_and_one_line() -> None:
    for arguments in (["--sm", "13.7"], ["--sm", "9.0", "--scheme", "int3"], ["--sm", "9.0", "--nonsense"]):
        ended = moedoctor(*arguments)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; from moedoctor.cli import main; "
        "print(main(['backends', '--sm', '9.0', '--no-ask']), 'torch' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=HERE, timeout=60)
    assert ended.stderr.split() == ["0", "False"]
