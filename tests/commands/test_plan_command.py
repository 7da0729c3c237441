"""`moedoctor plan` from the command line."""

import json

import pytest

from moedoctor.cli import main

ISSUE = ["plan", "--model", "nemotron-3-super-120b", "--kv-dtype", "fp8", "--context", "262144"]


def test_the_table_shows_the_issues_row_and_what_was_computed(capsys):
    assert main([*ISSUE, "--available-kv", "16.79"]) == 0
    shown = capsys.readouterr().out
    assert "732,160  as vLLM 0.17.1 to 0.20.0 print them" in shown
    assert "nothing was measured" in shown


@pytest.mark.parametrize("format", ["json", "markdown"])
def test_other_formats_and_a_file(format, tmp_path, capsys):
    file = tmp_path / "plan"
    assert main([*ISSUE, "--available-kv", "18.37", "--format", format, "-o", str(file)]) == 0
    text = file.read_text()
    if format == "json":
        document = json.loads(text)
        assert document["command"] == "plan"
        assert document["plan"]["kv"]["tokens_printed_to_0_20"] == 798_720
    else:
        assert "| KV tokens | 798,720 |" in text
    assert capsys.readouterr().out == ""


def test_a_context_that_does_not_fit_is_1(capsys):
    assert main([*ISSUE, "--available-kv", "0.5"]) == 1
    assert "not one request of 262144 tokens fits" in capsys.readouterr().out


def test_a_checkpoints_own_size_is_taken(tmp_path, capsys):
    config = {
        "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4,
        "head_dim": 16,         "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    command = ["plan", "--model", str(tmp_path), "--gpu-memory", "1", "--context", "16", "--scheme", "bf16"]
    assert main([*command, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    assert found["expert_bytes"] + found["other_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nothing"], "no such preset"),
        (["--model", "qwen3-30b-a3b"], "neither --gpu-memory"),
        (["--model", "qwen3-30b-a3b", "--scheme", "int3"], "--scheme int3: expected one of"),
        (["--model", "qwen3-30b-a3b", "--gpu-memory", "-1"], "expected a number above 0"),
        (["--model", "qwen3-30b-a3b", "--gpu-memory", "nan"], "expected a number above 0"),
        (["--model", "qwen3-30b-a3b", "--gpu-memory", "8", "--utilization", "2"], "expected 0 to 1"),
        (["--model", "qwen3-30b-a3b", "--gpu-memory", "8", "--format", "pdf"], "--format pdf"),
        (
            ["--model", "qwen3-30b-a3b", "--gpu-memory", "80", "--backend", ""],
            "--backend '': expected one of",
        ),
        (
            ["--model", "qwen3-30b-a3b", "--gpu-memory", "80", "--hit-rate", "0.5"],
            "give --expert-cache SLOTS",
        ),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, said, capsys):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_malformed_config_is_one_line_and_2(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 0}')
    assert main(["plan", "--model", str(tmp_path), "--gpu-memory", "8"]) == 2
    error = capsys.readouterr().err
    assert "num_hidden_layers is 0, expected a whole number, at least 1" in error
    assert error.count("\n") == 1


def test_a_backend_may_be_written_in_any_case(capsys):
    command = ["plan", "--model", "qwen3-30b-a3b", "--gpu-memory", "80", "--scheme", "fp8"]
    assert main([*command, "--backend", "vllm-cutlass"]) == 0
    assert "workspace of VLLM_CUTLASS" in capsys.readouterr().out
