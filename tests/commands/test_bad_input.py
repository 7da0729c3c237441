"""Bad input of any command is exit code 2 and one line that says what is wrong, with nothing on stdout."""

import json
import shlex
from pathlib import Path

import pytest
from capsules import make_capsule
from every_command import PLANTED

from moedoctor import environment
from moedoctor.cli import main
from moedoctor.trace.capsule import save

OURS = "bench --backend OURS --hidden 64 --intermediate 32 --experts 4 --top-k 2"
ENGINE = "bench --engine --model model"
CACHE = "bench --cache --trace zipf:experts=16,top_k=2,layers=2,rows=64,streams=4"
PLAN = "plan --model qwen3-30b-a3b"
BACKENDS = "backends --sm 9.0"
CASES = [
    ("bench", "say what to measure: --backend NAME, --engine or --cache"),
    ("bench --backend MARLIN", "--backend MARLIN: needs an NVIDIA GPU, none is visible; what runs here: "),
    ("bench --backend NONSENSE", "--backend NONSENSE: expected one of MARLIN, HUMMING"),
    ("bench --backend batched-triton", "--backend batched-triton: vLLM 0.33.0 has it for fp8, fp8-block"),
    ("bench --backend ,", "--backend: expected all or some of"),
    ("bench --backend MARLIN --quantization bf16", "MARLIN: has nvfp4, fp8, fp8-block, not bf16"),
    ("bench --backend OURS --model gpt-5", "--model gpt-5: no such preset or folder"),
    ("bench --backend OURS --hidden 64", "--intermediate: is missing"),
    (f"{OURS} --model qwen3-30b-a3b", "--hidden: --model gives the sizes"),
    (f"{OURS} --top-k 9", "top_k: 9 is more than experts 4"),
    (f"{OURS} --tokens 0", "--tokens 0: expected 1 to 8192"),
    (f"{OURS} --routing uniform", "--routing uniform: expected balanced, zipf"),
    (f"{OURS} --routing zipf:x", "--routing zipf:x: expected a skew"),
    (f"{OURS} --trace nowhere", "nowhere"),
    (f"{OURS} --trace x --routing zipf", "--routing zipf: --trace gives"),
    ("bench --engine", "0 models given; expected one: --model FOLDER"),
    ("bench --engine --cache", "--engine and --cache are different benchmarks"),
    ("bench --fixes offload", "--fixes belongs to --engine"),
    (f"{ENGINE} --variant a", "--variant a: expected NAME="),
    (f"{ENGINE} --variant a= --variant a=", "expected names that differ"),
    (f"{ENGINE} --batch x", "--batch x: expected 1 to 1024"),
    (f"{ENGINE} --moe-backend 'a b'", "expected names of vLLM's --moe-backend"),
    (f"{ENGINE} --fixes nonsense", "--fixes nonsense: expected some of backend"),
    (f"{ENGINE} --arguments {{", "expected JSON, such as"),
    (ENGINE, "expected a GPU and an installed vLLM"),
    ("bench --cache --batch 1,8", "expected one number with --cache"),
    ("bench --cache --trace missing.safetensors", "missing.safetensors: cannot be read"),
    (f"{CACHE} --capacity 0", "--capacity 0: expected slots"),
    (f"{CACHE} --policy fifo", "--policy fifo: expected one of lru, lfu, lfru, aging, belady"),
    (f"{CACHE} --format junit", "--format junit: expected one of table, json, markdown"),
    ("check extra", "extra"),
    ("check --python /no/such/python", "is not an executable file"),
    ("check --source nowhere", "expected a folder that holds vllm/envs.py"),
    ("check --wheel model", "expected a wheel"),
    ("check --release 0.16.0", "--release 0.16.0: the tables know 0.17.1"),
    ("check --release 0.33.0 --sm 13", "--sm 13: expected one of"),
    ("check --python /bin/ls --release 0.33.0", "expected one of them"),
    ("backends", "no NVIDIA GPU is visible here; name one: --sm 12.0"),
    (f"{BACKENDS} --activation tanh", "activation tanh: vLLM 0.33.0 knows silu"),
    (f"{BACKENDS} --scheme nvfp4 --backend BANANA", "not a MoE backend of vLLM 0.33.0 for nvfp4"),
    ("audit /no/a.so --sm 12.0", "no such"),
    ("plan --model nothing", "no such preset"),
    ("plan --model bad --gpu-memory 8", "num_hidden_layers is 0, expected a whole number, at least 1"),
    (PLAN, "neither --gpu-memory"),
    (f"{PLAN} --gpu-memory 8 --utilization 2", "expected 0 to 1"),
    (f"{PLAN} --gpu-memory 80 --backend ''", "--backend '': expected one of"),
    (f"{PLAN} --gpu-memory 80 --hit-rate 0.5", "give --expert-cache SLOTS"),
    ("preflight --sm 9.0", "expected one of: -- vllm serve MODEL"),
    ("preflight --sm 9.0 --wheel nowhere.whl -- vllm serve M", "nowhere.whl: is neither a file nor"),
    ("preflight headers", "expected one checkpoint folder"),
    ("record -o c --when always -- true", "expected nan, first, crash, call=LAYER:N or mismatch=RATE"),
    ("record -o c --max-size 0 -- true", "--max-size"),
    ("record -o c -- /nowhere/vllm serve", "/nowhere/vllm cannot be run: No such file or directory"),
    ("replay nothing.moecapsule", "nothing.moecapsule: cannot be read"),
    ("replay a.moecapsule --backend MARLN", "--backend MARLN: expected all, or one of"),
    ("capsule copy a.moecapsule x --max-size 0.01", "one token and its experts need"),
    ("capsule copy a.moecapsule no/x", "no/x: its folder does not exist"),
    ("run MD0011", "did you mean MD011?"),
    ("run no/such/file.yaml", "no/such/file.yaml:1:"),
    ("run --subject vllm-0.19.1", "--subject vllm-0.19.1: expected one of faulty, fixed, installed, "),
    ("run --only experts", "--only experts: expected KEY=VALUE"),
    ("run --vllm-kernels 0.19.1", "expected X.Y.Z=PATH"),
    ("run --vllm-kernels 0.19.1=/no/such.whl", "/no/such.whl: cannot be read (no such file"),
    ("run --device tpu", "--device tpu: expected auto, cpu or cuda:N"),
    ("run --timeout 0", "--timeout 0: expected seconds, more than 0"),
    ("run --jobs 0", "Invalid value for '--jobs'"),
    ("run --tolerance 'a lot'", "a lot"),
    ("run --baseline /no/such.json", "/no/such.json:1:"),
    ("frob", "No such command 'frob'"),
    ("backends --moe-backend marlin", " backends -- vllm serve MODEL --moe-backend …; see"),
    ("backends --relaese 5", "No such option: --relaese (Possible options: --release); see"),
    ("preflight vllm serve m -tp 2", "-tp: the options of a server follow"),
    ("plan --max-model-len 5", "--max-model-len is an option of vLLM and not of this command; see"),
    ("compare a.json b.json", "a.json:1:"),
    (f"conform {PLANTED}:Cache --question groups", ":Cache: it is a cache, which has no question groups"),
    ("conform a.py:Cache --question nothing", "--question nothing: expected"),
    ("conform a.py:Cache --formats int3", "--formats int3: expected"),
    ("compare", "expected two JSON reports, BASELINE and CURRENT, or --release A B"),
    ("compare --release 0.33.0 9.9", "--release 9.9: the tables know 0.17.1"),
    ("explain nan_rooting", "did you mean nan_routing?"),
    ("list -o a.xml", "this command has no format junit"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, a config.json that cannot be read, and a capsule."""
    made = tmp_path_factory.mktemp("bad")
    for name, config in (("model", {"vocab_size": 100}), ("bad", {"num_hidden_layers": 0})):
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(config))
    save(make_capsule("nvfp4"), made / "a.moecapsule")
    return made


@pytest.mark.usefixtures("replayed_here", "forked_examination")
@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_bad_input_is_one_line_and_exit_code_2(line, message, folder, monkeypatch, capsys):
    nothing = dict.fromkeys(("gpu", "capability", "vllm", "flashinfer"))
    facts = {**environment.collect(), **nothing, "gpus": []}
    monkeypatch.setattr(environment, "collect", lambda: facts)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (len(printed.err.splitlines()), printed.out) == (1, "")
    assert not (folder / "a.xml").exists()
