"""`moedoctor bench --engine` as a command: refusals, the report, and `show`."""

import json
from pathlib import Path
from typing import Any

import pytest

from moedoctor import cli, environment
from moedoctor.bench.engines import EngineRow
from moedoctor.commands.bench import engines
from moedoctor.commands.options import InputError


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


@pytest.mark.slow
def test_the_report_is_stored_and_shown(tiny, tmp_path, monkeypatch, capsys):
    facts = {"gpu": "a GPU", "capability": "9.0", "gpus": [], "vllm": "0.21.0", "torch_cuda": "13.0"}
    monkeypatch.setattr(environment, "collect", lambda: facts)
    stored = tmp_path / "report.json"
    arguments = ("--engine", "--model", str(tiny), "--batch", "1,2", "--format", "json", "-o", str(stored))
    assert bench(*arguments, "--variant", "base=", "--variant", "bad=MOEDOCTOR_FIXES=moe") == 1
    summary = capsys.readouterr().err
    assert "batch 2: base" in summary
    assert "1 failed" in summary
    found = json.loads(stored.read_text())["bench"]["engines"]
    failed = {row["variant"]: row.get("failed") for row in found["engines"]}
    assert failed == {"base": None, "bad": "moe was asked for and is not active"}
    assert [(row["variant"], row["batch"]) for row in found["speeds"]] == [("base", 1), ("base", 2)]
    assert cli.main(["show", str(stored), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("bad: failed: moe was asked for") < shown.index("tokens per second")
    damaged = json.loads(stored.read_text())
    del damaged["bench"]["engines"]["engines"]
    stored.write_text(json.dumps(damaged))
    assert cli.main(["show", str(stored)]) == 2
    assert "engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["auto"]),
        (["--moe-backend", "marlin,triton"], ["marlin", "triton"]),
        (["--fixes", "moe,offload+routing"], ["auto", "moe", "offload+routing"]),
        (
            ["--moe-backend", "marlin,triton", "--fixes", "moe"],
            ["marlin", "marlin+moe", "triton", "triton+moe"],
        ),
        (["--variant", "base=", "--fixes", "moe"], ["base", "moe"]),
        (["--variant", "base="], ["base"]),
    ],
)
def test_backends_and_fixes_are_short_forms_of_variants(tiny, monkeypatch, options, names):
    plans = []

    def measure(plan: Any) -> Any:
        plans.append(plan)
        raise InputError("enough")

    monkeypatch.setattr(engines, "measure", measure)
    assert bench("--engine", "--model", str(tiny), *options) == 2
    assert [variant.name for variant in plans[0].variants] == names
    fixed = [variant for variant in plans[0].variants if variant.name.endswith("moe")]
    assert all(variant.environ == {"MOEDOCTOR_FIXES": "moe"} for variant in fixed)


def test_random_weights_are_written_for_the_engines_and_gone_afterwards() -> None:
    with engines.write_random(Path("random:layers=1")) as folder:
        assert (folder / "config.json").is_file()
    assert not folder.exists()
    with pytest.raises(InputError, match="hidden: 8"), engines.write_random(Path("random:hidden=8")):
        pass


@pytest.mark.parametrize(
    ("scheme", "backend", "peak", "planned"),
    [
        ("bf16", "TRITON", 5, 0),
        ("fp8", "MARLIN", 5, 8 * 256 * 256 * 2 + 256 * 256),
        ("fp8", "MARLIN", None, None),  # the engine did not start, or is in other processes
        ("bf16", "FLASHINFER_TRTLLM", 5, None),
        ("bf16", "", 5, None),
    ],
)
def test_the_peak_of_loading_is_beside_that_of_plan(scheme, backend, peak, planned):
    with engines.write_random(Path(f"random:layers=1,scheme={scheme}")) as folder:
        row = EngineRow("a", "", moe_backend=backend, load_peak_bytes=peak)
        assert engines._add_planned_peak(row, folder).planned_peak_bytes == planned
