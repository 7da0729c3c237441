"""`moedoctor plan` from the command line."""

import json

import pytest

from moedoctor.cli import main
from moedoctor.commands.options import InputError
from moedoctor.commands.plan import plan as plan_command
from moedoctor.diagnose.preflight import ask, checkpoint_load
from moedoctor.diagnose.preflight.records import StartAnswer, Verdict

CONFIG = {
    "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
SIZE = 160_000
"""Bytes of that model in BF16, and a little more."""


def model_folder(folder, files, **config):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, size in files.items():
        (folder / name).write_bytes(bytes(size))
    return folder


def planned(folder, capsys, **options):
    """Run the command without --scheme and return (inputs, plan)."""
    assert plan_command(str(folder), gpu_memory=1, context=16, format="json", **options) == 0
    document = json.loads(capsys.readouterr().out)
    return document["inputs"], document["plan"]


def test_weights_stored_twice_are_counted_once(tmp_path, capsys):
    model_folder(tmp_path, {"model.safetensors": SIZE, "consolidated.safetensors": SIZE})
    assert planned(tmp_path, capsys)[0]["checkpoint_bytes"] == SIZE


def index(folder, *shards):
    weights = {f"tensor{number}": shard for number, shard in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_only_the_shards_of_the_index_are_counted(tmp_path, capsys):
    files = {"model-1.safetensors": SIZE // 2, "model-2.safetensors": SIZE // 2, "x.safetensors": SIZE}
    model_folder(tmp_path, files)
    index(tmp_path, "model-1.safetensors", "model-2.safetensors", "model-1.safetensors")
    assert planned(tmp_path, capsys)[0]["checkpoint_bytes"] == SIZE


def test_missing_shards(tmp_path, capsys):
    model_folder(tmp_path, {"model-1.safetensors": SIZE})
    index(tmp_path, "model-1.safetensors", "model-2.safetensors")
    with pytest.raises(InputError, match=r"1 of 2 shards are missing, the first is 'model-2\.safetensors'"):
        plan_command(str(tmp_path), gpu_memory=1)
    (tmp_path / "model-1.safetensors").unlink()
    assert planned(tmp_path, capsys)[0]["checkpoint_bytes"] is None, "an index alone: computed"
    index(tmp_path, "../model-1.safetensors")
    with pytest.raises(InputError, match="weight_map names no files"):
        plan_command(str(tmp_path), gpu_memory=1)


def compressed(*made):
    """Return compressed-tensors' groups of (targets, bits, group size)."""
    groups = {}
    for number, (targets, bits, size) in enumerate(made):
        weights = {"num_bits": bits, "type": "float", "group_size": size}
        groups[f"group_{number}"] = {"targets": targets, "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


EXPERT, ATTENTION = "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.q_proj"
SHARED = "model.layers.0.mlp.shared_experts.up_proj"
MIXED = {ATTENTION: "FP8", SHARED: "FP8", EXPERT: "NVFP4"}
DECLARED = [
    (None, "bf16"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, "bf16"),
    ({"quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
    (
        {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {module: {"quant_algo": algorithm} for module, algorithm in MIXED.items()},
        },
        "nvfp4",
    ),
    (compressed((["Linear"], 4, 16)), "nvfp4"),
    (compressed((["Linear"], 4, 32)), "mxfp4"),
    (compressed((["re:.*self_attn.*"], 8, None), (["re:.*mlp.experts.*"], 4, 16)), "nvfp4"),
    (compressed((["re:.*shared_experts.*"], 8, None), (["Linear"], 4, 16)), "nvfp4"),
]


@pytest.mark.parametrize(("declared", "scheme"), DECLARED)
def test_without_an_option_the_scheme_comes_from_the_config(declared, scheme, tmp_path, capsys):
    config = {} if declared is None else {"quantization_config": declared}
    model_folder(tmp_path, {}, **config)
    assert planned(tmp_path, capsys)[0]["scheme"] == scheme
    assert planned(tmp_path / "config.json", capsys)[0]["scheme"] == scheme
    assert planned(tmp_path, capsys, scheme="mxfp4")[0]["scheme"] == "mxfp4", "an explicit one stands"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "plan does not know the scheme quant_method 'gptq'"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {EXPERT: {"quant_algo": "NVFP4"}, EXPERT + "x": {"quant_algo": "FP8"}},
            },
            "stores experts in fp8 and nvfp4; give the --scheme",
        ),
        ({"config_groups": {}}, "stores experts in nothing; give the --scheme"),
        ({"config_groups": {"group_0": {"targets": 7, "weights": 7}}}, "not floats of 4 or 8 bits"),
        ("fp8", "its quantization is not an object; give --scheme"),
    ],
)
def test_an_unknown_scheme_is_refused_in_one_line(declared, message, tmp_path):
    model_folder(tmp_path, {}, quantization_config=declared)
    with pytest.raises(InputError) as raised:
        plan_command(str(tmp_path), gpu_memory=1, context=16)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_that_does_not_fit_has_its_table_and_exit_code_1(capsys):
    command = ["plan", "--model", "qwen3-30b-a3b", "--gpu-memory", "8", "--context", "8192"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1].startswith("does not fit: the GPU lacks ")
    assert lines[1].endswith(" GiB for weights and workspace alone")
    assert lines[2].startswith("Next: it fits, with one request, with --offload ")
    assert any(line.startswith("expert weights") for line in lines)
    assert "exit code 1: does not fit" in err
    assert main([*command, "--tensor-parallel-size", "8"]) == 0
    assert "every size is of each GPU" in capsys.readouterr().out


def test_the_installed_vllm_says_how_large_its_parameters_are(tmp_path, capsys, monkeypatch):
    model_folder(tmp_path, {})
    asked = []

    def ask_release(release, commands, question, headers):
        asked.append(commands[0].words[1:])
        return [answer]

    answer = StartAnswer("0.33.0", (), Verdict.STARTS, "", "", (), (), weight_bytes=(SIZE, 2 * SIZE))
    monkeypatch.setattr(ask, "find_installed", lambda: ask.Release("0.33.0"))
    monkeypatch.setattr(checkpoint_load, "ask_release", ask_release)
    inputs, result = planned(tmp_path, capsys, ask=True, scheme="bf16", tensor_parallel_size=2)
    assert inputs["built_by"] == "0.33.0"
    assert result["expert_bytes"] + result["other_bytes"] == 2 * SIZE
    assert asked == [("--tensor-parallel-size", "2")]
    answer = StartAnswer("0.33.0", (), Verdict.REFUSED, "0.33.0 stops: why", "", (), ())
    with pytest.raises(InputError, match=r"0\.33\.0 stops: why"):
        plan_command(str(tmp_path), gpu_memory=1, ask=True)
    answer = StartAnswer("0.33.0", (), Verdict.STARTS, "", "", (), (), weight_bytes=(10,))
    with pytest.raises(InputError, match="give the right --scheme"):
        plan_command(str(tmp_path), gpu_memory=1, ask=True, scheme="bf16")
    monkeypatch.setattr(ask, "find_installed", lambda: None)
    with pytest.raises(InputError, match="vllm is not installed here"):
        plan_command(str(tmp_path), gpu_memory=1, ask=True)
