"""`moedoctor lint`: formats, exit codes, corrected copies, and the time and memory of a large checkpoint."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from checkpoints_of_tests import INDEX, Made, block_fp8, f32, modelopt

from moedoctor import environment
from moedoctor.cli import main
from moedoctor.commands.lint import lint as lint_command
from moedoctor.commands.options import InputError
from moedoctor.diagnose.checkpoint.findings import CHECKS
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.preflight import ask, checkpoint_load
from moedoctor.diagnose.preflight.records import PreflightFinding, StageAnswer, StartAnswer, Verdict

UP = "model.layers.1.mlp.experts.2.up_proj"


def test_a_remark_alone_is_reported_and_gives_no_exit_code(tmp_path, capsys):
    made = block_fp8()
    made.config["num_attention_heads"] = 8  # 128 rows in blocks of 32 do not divide by 8
    assert lint_command(made.write(tmp_path)) == 0
    out = capsys.readouterr().out
    for words in (
        "not for TP 8 (fits: 1, 2, 4)",
        "nothing wrong was found",
        "0 kinds of damage and 1 remark in",
    ):
        assert words in out
    assert lint_command(tmp_path, "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["exit_code"] == 0
    assert [finding["evidence"]["remark"] for finding in document["findings"]] == [True]
    made.tensors[f"{UP}.weight_scale_inv"] = f32(*[0.0] * 8, shape=(4, 2))
    assert lint_command(made.write(tmp_path), "json") == 1


def test_nothing_passes_that_was_not_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = modelopt().write(tmp_path)
    assert lint_command(folder) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "values of the weights: only headers, JSON files and scales were read" in out
    assert "vLLM is not installed here; moedoctor preflight --wheel FILE -- vllm serve" in out
    lint_command(folder, "junit")
    cases = ElementTree.fromstring(capsys.readouterr().out).iter("testcase")
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    assert skipped == {name for name, check in CHECKS.items() if check.asked}
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    lint_command(folder, "junit")
    cases = ElementTree.fromstring(capsys.readouterr().out).iter("testcase")
    looked_at = [case.get("name") for case in cases if case.find("skipped") is None]
    assert looked_at == ["file_truncated a file is truncated"]


ANSWERS = {
    "not written": ("load", "passed", "not-written", "not_written", 1),
    "cut": ("load", "passed", "cut", "tensor_cut", 1),
    "refused while it loads": ("load", "stopped", "refused", "load_refused", 1),
    "refused while it builds": ("build", "stopped", "refused", "load_refused", 1),
    "refused by the configuration": ("config", "stopped", "refused", None, 0),
    "not asked to the end": ("load", "cannot say", "cannot-say", None, 0),
}


@pytest.mark.parametrize(("stage", "outcome", "rule", "check", "code"), ANSWERS.values(), ids=ANSWERS)
def test_an_installed_vllm_is_asked_to_load(stage, outcome, rule, check, code, tmp_path, monkeypatch, capsys):
    def ask_release(release: ask.Release, commands: Any, question: ask.Question, headers: Any) -> Any:
        assert question.capability == (9, 0)
        finding = PreflightFinding(rule, "error", "its own words", "", tensor=f"{UP}.weight")
        stages = (StageAnswer(stage, outcome),)
        words = commands[0].words
        return [StartAnswer("0.33.0", words, Verdict.STARTS, "a reason", "", stages, (finding,))]

    monkeypatch.setattr(ask, "find_installed", lambda: ask.Release("0.33.0"))
    monkeypatch.setattr(checkpoint_load, "ask_release", ask_release)
    monkeypatch.setattr(environment, "collect", lambda: {"capability": None})
    folder = modelopt().write(tmp_path)
    assert lint_command(folder, "json") == code
    document = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in document["findings"]] == ([check] if check else [])
    for row in document["findings"]:
        (place,) = row["evidence"]["places"]
        assert place == {"tensor": f"{UP}.weight", "shard": "model.safetensors", "value": "its own words"}
    asked = outcome == "passed" or check is not None
    assert bool(document["loaded_by"]) is asked
    assert any("a reason" in note for note in document["not_looked_at"]) is not asked
    assert lint_command(folder, "json", ask=False) == 0
    assert "--no-ask" in capsys.readouterr().out


def test_a_release_that_loads_the_names_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = modelopt()
    made.tensors = {name.replace("gate_proj", "w1_proj"): each for name, each in made.tensors.items()}
    result = lint(made.write(tmp_path))
    assert [finding.check for finding in result.findings] == ["name_skipped"]
    answer = StartAnswer("0.34.0", ("m",), Verdict.STARTS, "", "", (StageAnswer("load", "passed"),), ())
    monkeypatch.setattr(checkpoint_load, "ask_release", lambda *given: [answer])
    checkpoint_load.ask_load(result, ask.Release("0.34.0"), (9, 0))
    assert result.findings == ()


def test_impossible_paths_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made, long = modelopt(), "a" * 5000
    for name in [name for name in made.tensors if name.endswith("k_scale")]:
        del made.tensors[name]  # so that --fix has something to write
    folder = made.write(tmp_path / "c")
    new = (long, f"{long}/{long}", str(tmp_path / long))
    for arguments in ([long], *([str(folder), option, path] for option in ("--fix", "-o") for path in new)):
        assert main(["lint", *arguments]) == 2, arguments[1:2]
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_pattern_that_was_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = modelopt()
    made.config["quantization_config"]["ignore"] = ["re:(a+)+"]
    made.hf_quant = None
    assert lint_command(made.write(tmp_path)) == 0
    assert "not read: the pattern re:(a+)+" in capsys.readouterr().out


def test_wrong_options(tmp_path: Path) -> None:
    folder = modelopt().write(tmp_path / "c")
    for fix in (folder, folder / "inside", tmp_path / "c" / ".." / "c"):
        with pytest.raises(InputError, match="the checkpoint's own folder"):
            lint_command(folder, fix=fix)
    with pytest.raises(InputError, match="parent folder does not exist"):
        lint_command(folder, fix=tmp_path / "no" / "where")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(InputError, match="the checkpoint's own folder"):
        lint_command(folder, fix=link)


def fixed(made: Made, tmp_path: Path) -> tuple[set[str], set[str]]:
    """Return the checks with findings before and after the corrected files replace the old ones."""
    folder, fix = made.write(tmp_path / "c"), tmp_path / "fix"
    before = {finding.check for finding in lint(folder).findings}
    unchanged = {file.name: file.read_bytes() for file in folder.iterdir()}
    lint_command(folder, "json", tmp_path / "report.json", fix)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == unchanged
    changed = {name for name, data in unchanged.items() if (fix / name).read_bytes() != data}
    assert all(name.endswith(".json") for name in changed)
    assert {file.name for file in fix.iterdir()} == unchanged.keys()
    return before, {finding.check for finding in lint(fix).findings}


def test_fix_makes_an_index_from_the_shards(tmp_path: Path) -> None:
    made = modelopt(3)
    made.change_index = lambda index: index["weight_map"].pop(f"{UP}.weight")
    assert fixed(made, tmp_path) == ({"index_disagrees"}, set())
    index = json.loads((tmp_path / "fix" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in made.tensors.values())


def test_fix_removes_a_kv_cache_without_scales_and_keeps_half_a_character(tmp_path: Path) -> None:
    made = modelopt()
    made.config["producer"] = "\ud800 é"
    for name in [name for name in made.tensors if name.endswith(("k_scale", "v_scale"))]:
        del made.tensors[name]
    assert fixed(made, tmp_path) == ({"kv_scales_missing"}, set())
    assert json.loads((tmp_path / "fix" / "config.json").read_text("utf-8"))["producer"] == "\ud800 é"


def test_fix_corrects_the_scheme_of_both_files_and_the_advice_is_the_copy(tmp_path, capsys):
    made = modelopt()
    made.config["quantization_config"]["quant_algo"] = "FP8"
    made.tensors[f"{UP}.weight_scale_2"] = f32(3e-4)
    assert lint_command(made.write(tmp_path / "c"), fix=tmp_path / "fix") == 1
    out, err = capsys.readouterr()
    assert "--fix DIR" not in out
    assert re.search(r"Next: use the repaired copy in \S+fix \(", out)
    assert f"{tmp_path / 'fix'} is written" in err
    assert lint(tmp_path / "fix").findings == ()


def test_fix_writes_nothing_if_nothing_can_be_repaired(tmp_path, capsys):
    made = modelopt()
    del made.tensors[f"{UP}.weight_scale_2"]
    folder = made.write(tmp_path / "c")
    assert lint_command(folder, fix=tmp_path / "fix") == 1
    out, err = capsys.readouterr()
    assert "--fix" not in out, "advice that does nothing"
    assert "nothing is written: nothing here can be repaired" in err
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "hf_quant_config.json"])
def test_a_truncated_file_is_a_finding(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its length, a file that was cut is nothing but truncated."""
    made = modelopt()
    whole = (made.write(tmp_path / "whole") / name).read_bytes()
    for number, size in enumerate((0, 7, 30, len(whole) // 2, len(whole) - 3)):
        folder = made.write(tmp_path / str(number))
        (folder / name).write_bytes(whole[:size])
        assert lint_command(folder, "json", fix=tmp_path / "fix") == 1
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert finding["check"] == "file_truncated"
        assert finding["evidence"]["places"][0]["shard"] == name
        assert "download it again" in finding["next_step"]
    assert not (tmp_path / "fix").exists()


def test_a_pointer_of_git_lfs_was_never_downloaded(tmp_path: Path) -> None:
    folder = modelopt().write(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
    (folder / "model.safetensors").write_bytes(pointer)
    (finding,) = lint(folder).findings
    assert "git lfs pull" in finding.places[0].value


PROBE = """
import contextlib, sys
from pathlib import Path
from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
result = None
with contextlib.suppress(CheckpointError):
    result = lint(Path(sys.argv[1]))
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(int(peak) // 1024, *(result.tensors, result.shards) if result else ())
"""


def lint_in_a_child(folder: Path) -> list[int]:
    """Return the peak memory in MiB with the interpreter's own, then tensors and shards if lint took it."""
    command = [sys.executable, "-c", PROBE, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [int(number) for number in ended.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_tensor_of_block_scales_is_never_held_as_a_whole(tmp_path: Path) -> None:
    folder, size = modelopt().write(tmp_path), 80 << 20
    entry = {"dtype": "F8_E4M3", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.mlp.experts.0.up_proj.weight_scale": entry}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file of zeros
    megabytes, tensors, _ = lint_in_a_child(folder)
    assert (megabytes < 100, tensors) == (True, 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_header_of_nested_lists_costs_no_more_memory_than_its_text(tmp_path: Path) -> None:
    folder = modelopt().write(tmp_path)
    header = b'{"t": {"shape": [' + b"[]," * 6_000_000 + b"[]]}}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert lint_in_a_child(folder)[0] < 120


ADAPTERS = [("stopped", "refused", "adapter_refused"), ("passed", "adapter-unused", "adapter_unused")]


@pytest.mark.parametrize(("outcome", "rule", "check"), ADAPTERS)
def test_an_adapter_is_applied_by_the_installed_vllm(outcome, rule, check, tmp_path, monkeypatch, capsys):
    asked: list[tuple[str, ...]] = []

    def ask_release(release: ask.Release, commands: Any, *_: Any) -> Any:
        asked.append(commands[0].words[1:])
        finding = PreflightFinding(rule, "error", "its own words", "")
        stages = (StageAnswer("load", "passed"), StageAnswer("adapters", outcome))
        return [StartAnswer("0.33.0", ("m",), Verdict.STARTS, "a reason", "", stages, (finding,))]

    monkeypatch.setattr(ask, "find_installed", lambda: ask.Release("0.33.0"))
    monkeypatch.setattr(checkpoint_load, "ask_release", ask_release)
    folder, adapter = modelopt().write(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    config = adapter / "adapter_config.json"
    command = ["lint", str(folder), "--adapter", str(adapter), "--format", "json"]
    for text in ("{}", '{"r": 513}', '{"r": "8"}', "["):
        config.write_text(text)
        assert main(command) == 2
        assert "is not an adapter" in capsys.readouterr().err
    config.write_text('{"r": 24}')
    assert main(command) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["check"]) for row in document["findings"]] == [("MD029", check)]
    flags = ("--enable-lora", "--max-lora-rank", "32", "--lora-modules", f"adapter={adapter.resolve()}")
    assert asked == [flags]
    assert main([*command, "--no-ask"]) == 2
    monkeypatch.setattr(ask, "find_installed", lambda: None)
    assert main(command) == 2
    assert "--adapter: vLLM is not installed here" in capsys.readouterr().err
