"""`moedoctor bench --backend`: wrong usage, and a complete run of REFERENCE on a CPU."""

import json
from pathlib import Path

import pytest

from moedoctor import cli
from moedoctor.bench.moe import run as moe_run
from moedoctor.commands.bench import backends
from moedoctor.trace.format import RoutingTrace, save

LIMITS = {"bytes_per_second": 1e9, "flops": {"bf16": 1e12}}
TINY = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--top-k", "2"]


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


@pytest.mark.slow
def test_reference_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backends, "measure_machine", lambda device: (LIMITS, {}))
    report, picture = tmp_path / "report.json", tmp_path / "plot.svg"
    code = bench(
        "--backend", "reference", "--quantization", "nvfp4", *TINY, "--tokens", "1,5",
        "--device", "cpu", "--format", "json", "-o", str(report), "--plot", str(picture),
    )  # fmt: skip
    assert code == 0
    found = json.loads(report.read_text())["bench"]["backends"]
    assert found["layers"]["custom"]["top_k"] == 2
    rows = [row for row in found["rows"] if "time_us" in row]
    assert [row["tokens"] for row in rows] == [1, 5]
    assert all(row["right"] and row["cosine"] > 0.9999 for row in rows)
    assert "2 points timed, 0 wrong, 0 failed, 0 not available" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert picture.read_text().startswith("<?xml")


def measured(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, object]) -> list[moe_run.LayerTask]:
    """Replace the children: record what they are asked for, and answer with these rows."""
    asked: list[moe_run.LayerTask] = []

    def answer(tasks: list[moe_run.LayerTask], *_: object, **__: object) -> list[dict[str, object]]:
        asked.extend(tasks)
        return [{"backend": "OURS", "quantization": "nvfp4", "model": tasks[0].model, **row} for row in rows]

    monkeypatch.setattr(backends, "measure_machine", lambda device: (LIMITS, {}))
    monkeypatch.setattr(backends, "measure_tasks", answer)
    return asked


WRONG = {"tokens": 1, "right": False, "wrong": "1 of 1 tokens: cosine 0", "cosine": 0.0}


@pytest.mark.parametrize(
    ("row", "code", "expected"),
    [
        (WRONG, 1, "OURS nvfp4, 1 tokens: WRONG, so not timed: 1 of 1 tokens: cosine 0"),
        ({"failed": "the process ended with -6: abort"}, 1, "OURS nvfp4: FAILED: the process ended"),
        ({"unavailable": "vLLM says: no"}, 2, "OURS: vLLM says: no; what runs here"),
    ],
)
def test_a_backend_without_a_right_result_has_an_exit_code(row, code, expected, monkeypatch, capsys):
    measured(monkeypatch, row)
    assert bench("--backend", "OURS", *TINY) == code
    assert expected in "".join(capsys.readouterr())


def test_a_folder_with_a_config_and_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "hidden_size": 64, "vocab_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_act": "silu",
    }  # fmt: skip
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    asked = measured(monkeypatch, WRONG)
    bench("--backend", "all", "--model", str(folder), "--model", "qwen3-30b-a3b", "--tokens", "8,1")
    assert {point.model for point in asked} == {"my-model", "qwen3-30b-a3b"}
    assert asked[0].shape.hidden == 64
    assert asked[0].tokens == (1, 8)
    assert {point.variant.name for point in asked} >= {"MARLIN", "EMULATION", "TRITON", "OURS"}
    assert "REFERENCE" not in {point.variant.name for point in asked}


def test_routes_out_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.safetensors"
    ids = [0, 1, 2, 3, 3, 2, 1, 0]  # two tokens, two layers, two experts each
    save(RoutingTrace(ids, 4, 2, ("a", "b"), (2,)), path)
    asked = measured(monkeypatch, WRONG)
    bench("--backend", "OURS", *TINY, "--trace", str(path))
    assert (asked[0].routing.kind, asked[0].routing.rows) == ("trace", [[0, 1], [3, 2]])


@pytest.mark.parametrize(
    ("ids", "experts", "message"),
    [
        ([0, 1, 2, 3], 8, "choose 2 of 8 experts, and custom 2 of 4"),
        ([0, -1, -1, 3], 4, "no row without an empty slot"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused_unmeasured(
    ids, experts, message, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "trace.safetensors"
    save(RoutingTrace(ids, experts, 2, ("a",), (2,)), path)
    asked = measured(monkeypatch, WRONG)
    assert bench("--backend", "OURS", *TINY, "--trace", str(path)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not asked


def test_tiles_are_written_beside_those_of_other_numbers_of_tokens(tmp_path, monkeypatch, capsys):
    name, rule = "E=4,N=32,device_name=NVIDIA_H200.json", {"BLOCK_SIZE_M": 16, "num_warps": 4}
    (tmp_path / name).write_text('{"1": {"BLOCK_SIZE_M": 32}, "64": {"BLOCK_SIZE_M": 64}}')
    tiles = {"file_name": name, "rule": rule, "found": rule | {"num_warps": 8}, "rule_us": 3.0}
    tiles |= {"found_us": 2.0, "ratio": 1.5}
    row = {"tokens": 1, "deterministic": True, "roofline_share": 0.5, "gigabytes_per_second": 1.0}
    row |= {"tflops": 1.0, "time_us": 3.0, "time_us_p20": 3.0, "time_us_p80": 3.0}
    asked = measured(monkeypatch, row | {"tiles": tiles})
    assert bench("--backend", "TRITON,OURS", "--device", "cpu", "--tune", str(tmp_path), *TINY) == 0
    assert [task.tune for task in asked] == [
        task.variant.name == "TRITON" and task.variant.quantization != "nvfp4" for task in asked
    ]
    written = json.loads((tmp_path / name).read_text())
    assert written == {"1": tiles["found"], "64": {"BLOCK_SIZE_M": 64}}
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("1.50", "num_warps 8", f"written: {name}"))
    measured(monkeypatch, row | {"tiles": tiles | {"ratio": 1.01, "file_name": "other"}})
    assert bench("--backend", "TRITON,OURS", "--device", "cpu", "--tune", str(tmp_path), *TINY) == 0
    assert "no file is written" in capsys.readouterr().out


def test_tiles_of_a_backend_without_such_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--backend", "MARLIN", "--device", "cpu", "--tune", "tiles", *TINY) == 2
    assert "only vLLM's Triton kernel has such files; expected --backend TRITON" in capsys.readouterr().err
