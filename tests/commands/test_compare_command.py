"""`moedoctor compare --release A B`: what an upgrade changes for a GPU and a command line."""

import json
from typing import Any

import pytest

from moedoctor import environment
from moedoctor.cli import main
from moedoctor.diagnose.upgrade import compare_releases

REMOVED = "VLLM_NVFP4_GEMM_BACKEND"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (REMOVED, "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    head, _, tail = " ".join(arguments).partition(" -- ")
    words = [*head.split(), "--format", "json", *(["--", *tail.split()] if tail else [])]
    code = main(["compare", "--release", *words])
    return code, json.loads(capsys.readouterr().out)


def test_failures_end_and_begin(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = compare(capsys, "0.19.1", "0.20.0", "--sm", "9.0")
    assert code == 0
    assert (document["baseline"], document["current"]) == ("vLLM 0.19.1", "vLLM 0.20.0")
    assert any(text.startswith("MD001 nan_routing: error -> note") for text in document["improvements"])
    assert any(text.startswith("MD009 offload_reinit ends") for text in document["improvements"])
    code, document = compare(capsys, "0.20.0", "0.19.1", "--sm", "9.0")
    assert code == 1
    assert any(text.startswith("MD001 nan_routing: note -> error") for text in document["regressions"])
    assert document["summary"]["exit_code"] == 1


def test_an_entry_with_two_causes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    notes = compare(capsys, "0.27.1", "0.33.0", "--sm", "9.0")[1]["notes"]
    assert any(text.startswith("MD013 offload_noop has another cause: functions of 0.33.0") for text in notes)


def test_a_failure_begins_for_a_command_line_that_has_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for line, code in (("vllm serve m --cpu-offload-gb 4", 1), ("vllm serve m", 0)):
        got, document = compare(capsys, "0.32.0", "0.33.0", "--sm", "9.0", "--", line)
        texts = document["regressions" if code else "notes"]
        (text,) = (each for each in texts if each.startswith("MD013 offload_noop begins (note)"))
        assert (got, text.endswith("and this command line has --cpu-offload-gb")) == (code, bool(code))


def test_flags_and_variables_of_the_command_line(capsys, monkeypatch):
    line = ("--", "vllm serve m --calculate-kv-scales")
    code, document = compare(capsys, "0.27.1", "0.33.0", "--sm", "9.0", *line)
    assert code == 1
    (text,) = document["regressions"]
    assert text.startswith("--calculate-kv-scales has no effect any more: vLLM 0.33.0 does not have it")
    assert compare(capsys, "0.33.0", "0.27.1", "--sm", "9.0", *line)[1]["improvements"]
    monkeypatch.setenv(REMOVED, "marlin")
    code, document = compare(capsys, "0.23.0", "0.24.0", "--sm", "9.0")
    assert code == 1
    assert any(REMOVED in text for text in document["regressions"])


def test_new_defaults_and_what_takes_them_back(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("0.27.1", "0.28.0", "--sm", "10.0", "--", "vllm serve deepseek-ai/DeepSeek-V4")
    note, _ = (text for text in compare(capsys, *line)[1]["notes"] if "default" in text)
    assert note.startswith(
        "new default since 0.28.0: the V2 model runner computes this model; VLLM_USE_V2_MODE"
    )
    assert not any(
        "default" in text for text in compare(capsys, "0.27.1", "0.28.0", "--sm", "10.0")[1]["notes"]
    )
    notes = compare(capsys, "0.20.0", "0.21.0", "--sm", "10.0")[1]["notes"]
    gone = compare(capsys, "0.23.0", "0.24.0", "--sm", "9.0", "--", "vllm serve m --quantization gguf")
    assert (gone[0], gone[1]["regressions"]) == (
        1,
        ["--quantization gguf is gone: vLLM 0.24.0 does not have it"],
    )
    assert any("VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0" in note for note in notes)
    later = compare(capsys, "0.20.0", "0.33.0", "--sm", "10.0")[1]["notes"]
    assert not any("VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0" in note for note in later)
    assert "other variables with another default: VLLM_ENABLE_PREGRAD_PASSES False -> True" in notes


def test_backends_of_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    # What changes one way changes back the other way.
    changed = compare_releases("0.17.1", "0.33.0", "7.5", {}, ())
    texts = [text for group in changed.values() for text in group if "experts on compute" in text]
    back = compare_releases("0.33.0", "0.17.1", "7.5", {}, ())
    assert len(texts) == len(
        [text for group in back.values() for text in group if "experts on compute" in text]
    )
    flag = ["vllm", "serve", "m", "--quantization", "fp8", "--moe-backend", "deep_gemm"]
    refused = compare_releases("0.33.0", "0.17.1", "9.0", {}, flag)["regressions"]
    assert any("no backend" in text or "--moe-backend" in text for text in refused)


def test_without_a_gpu_it_says_that_backends_were_not_compared(capsys, monkeypatch):
    monkeypatch.setattr(environment, "collect", lambda *sources: {})
    notes = compare(capsys, "0.32.0", "0.33.0")[1]["notes"]
    assert any("no GPU is visible here; name one: --sm 12.0" in text for text in notes)


def test_a_release_compared_with_itself_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = compare(capsys, "0.33.0", "v0.33.0", "--sm", "12.0")
    assert code == 0
    assert not any(document[name] for name in ("regressions", "improvements", "notes"))
