"""`moedoctor backends`: options, the command after ``--``, answers, formats, exit codes, no torch."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm_sources import write_source

from moedoctor import cli, environment
from moedoctor.commands import backends as command
from moedoctor.commands.backends import backends
from moedoctor.upstream.releases.release_source import ReleaseSource
from moedoctor.upstream.selection import agreement as backend_agreement
from moedoctor.upstream.selection.agreement import AgreementError, Heard


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)


def machine(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    known = {"capability": None, "vllm": None, "flashinfer": None, **facts}
    monkeypatch.setattr(environment, "collect", lambda: known)


def answer(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str] | None = None, **request: Any
) -> tuple[int, str]:
    with mock.patch.dict(os.environ, environ or {}, clear=True):
        code = backends(**{"scheme": "nvfp4", **request})
    return code, capsys.readouterr().out


def test_the_table_and_its_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, sm="12.0", release="0.21.0")
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == "vLLM 0.21.0 · compute capability 12.0 · nvfp4 · tp · silu"
    assert lines[1] == "FLASHINFER_CUTLASS is selected (automatic)"
    rows = {" ".join(line.split()[:2]): line for line in lines if line[:1] in "*+-"}
    assert rows["* FLASHINFER_CUTLASS"].endswith("chosen (automatic)")
    assert "only for 10.0 to 10.7" in rows["- FLASHINFER_TRTLLM"]
    assert "--moe-backend marlin" in rows["+ MARLIN"]
    assert "oracle/nvfp4.py" in text
    text = answer(capsys, {"VLLM_X|Y": "a<b"}, sm="12.0", release="0.21.0", format="markdown")[1]
    assert "| \\* | FLASHINFER_CUTLASS | `--moe-backend flashinfer_cutlass` | chosen (automatic) |" in text
    assert "VLLM_X\\|Y=a&lt;b" in text


def test_without_vllm_the_newest_release_is_answered_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, sm="9.0")[1]
    assert text.startswith("vLLM 0.33.0 ")
    assert "vllm is not installed here: answered for 0.33.0" in text


def test_a_vllm_between_the_tables(capsys, monkeypatch):
    def silent(*arguments: Any, **options: Any) -> tuple[Heard, ...]:
        raise AgreementError("the installed vllm did not answer")

    machine(monkeypatch, vllm="0.21.1rc1.dev5+gabc")
    monkeypatch.setattr(backend_agreement, "ask_all", silent)
    code, text = answer(capsys, sm="9.0")
    lines = text.splitlines()
    assert lines[0] == "vllm 0.21.1rc1.dev5+gabc is not in the tables: answered for 0.21.0"
    assert lines[2].startswith("vLLM 0.21.0 ")
    assert code == 0
    assert answer(capsys, sm="9.0", strict=True)[0] == 2


@pytest.mark.parametrize("release", ["0.34.0", "v0.34.0", "0.33.1.dev3", "0.33.0.post1"])
def test_a_newer_release_is_answered_as_the_newest(release: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, sm="9.0", release=release)
    named = release.removeprefix("v")
    assert code == 0
    assert text.startswith(f"vLLM {named} is newer than the known releases: this is the answer for 0.33.0\n")
    code, text = answer(capsys, sm="9.0", release=release, strict=True, format="json")
    assert code == 2
    assert json.loads(text)["instead_of"].startswith(f"vLLM {named} is newer")
    assert answer(capsys, sm="9.0", release="0.33.0", strict=True)[0] == 0


def test_a_setting_that_the_installed_source_declares_is_not_called_unknown(capsys, monkeypatch, tmp_path):
    write_source(tmp_path, "0.33.0", declared=("VLLM_BRAND_NEW_MOE_KNOB",))
    for place, text in (
        ("vllm/engine/arg_utils.py", "group.add_argument('--brand-new', type=int)\n"),
        ("vllm/entrypoints/cli/other.py", "group.add_argument('--newer', type=int)\n"),
        ("vllm/config/kernel.py", "MoEBackend = Literal['auto', 'marlin', 'brand_new']\n"),
        ("flashinfer/new.py", "os.environ['FLASHINFER_BRAND_NEW']\n"),
    ):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    machine(monkeypatch, vllm="0.34.1.dev5", flashinfer="0.8.0.dev1")
    monkeypatch.setattr(ReleaseSource, "installed", lambda package: ReleaseSource(tmp_path))
    environ = {"VLLM_BRAND_NEW_MOE_KNOB": "1", "FLASHINFER_BRAND_NEW": "1"}
    line = ["vllm", "serve", "m", "--brand-new", "3", "--newer", "4"]
    assert answer(capsys, environ, sm="9.0", command=line, ask=False)[0] == 0
    assert answer(capsys, environ, sm="9.0", command=[*line, "--never-was", "3"], ask=False)[0] == 1
    assert answer(capsys, {"FLASHINFER_NEVER_WAS": "1"}, sm="9.0", ask=False)[0] == 1
    code, text = answer(capsys, sm="9.0", command=["vllm", "--moe-backend", "Brand-New"], ask=False)
    assert (code, "0.33.0 has no --moe-backend brand_new: answered without it" in text) == (0, True)
    code, text = answer(capsys, sm="9.0", command=["vllm", "--moe-backend", "humming"], ask=False)
    assert (code, "this vLLM takes auto, marlin, brand_new, and stops" in text) == (1, True)
    asked = []

    def ask_own(given: Any, *, moe_backend: str = "auto", environ: Any) -> list[Heard]:
        asked.append(moe_backend)
        chosen = "BRAND_NEW" if moe_backend == "brand_new" else "MARLIN"
        return [Heard(chosen, None, {"BRAND_NEW": "", "MARLIN": "", "OTHER": "too old"}) for _ in given]

    monkeypatch.setattr(backend_agreement, "ask_all", ask_own)
    code, text = answer(capsys, sm="9.0", command=["vllm", "--moe-backend", "brand_new"])
    assert (code, asked, "BRAND_NEW is selected" in text) == (0, ["brand_new"], True)
    for name, works, how in (("brand-new", True, "--moe-backend brand_new"), ("other", False, None)):
        _, text = answer(capsys, sm="9.0", backend=name, format="json")
        request = json.loads(text)["request"]
        assert (request["works"], request["how"]) == (works, how)
    assert cli.main(["backends", "--sm", "9.0", "--scheme", "nvfp4", "--backend", "never_was"]) == 2
    assert "not a MoE backend of vLLM 0.34.1.dev5 for nvfp4; it has BRAND_NEW" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_", "environ", "reason"),
    [
        ({"backend": "flashinfer_trtllm"}, {}, "FLASHINFER_TRTLLM would not work"),
        ({}, {"VLLM_NVFP4_MOE_BACKEND": "marlin"}, "VLLM_NVFP4_MOE_BACKEND=marlin"),
        ({"scheme": None}, {"VLLM_NVFP4_MOE_BACKEND": "marlin"}, "VLLM_NVFP4_MOE_BACKEND=marlin"),
        ({"sm": "7.0", "release": "0.18.0"}, {}, "vLLM 0.18.0 does not start"),
        ({}, {}, ""),
        ({}, {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}, ""),  # it has an effect on linear layers
    ],
)
def test_an_exit_code_has_its_reasons_on_stderr_and_in_the_json(capsys, request_, environ, reason):
    with mock.patch.dict(os.environ, environ, clear=True):
        given = {"scheme": "nvfp4", "sm": "12.0", "release": "0.21.0", "format": "json", **request_}
        code = backends(**given)
    out, err = capsys.readouterr()
    document = json.loads(out)
    reasons = document.get("summary", {}).get("reasons", [])
    assert (code, document["exit_code"], bool(reasons)) == (int(bool(reason)), code, bool(reason))
    assert reason in "".join(reasons)
    assert err == "".join(f"moedoctor: exit code 1: {text}\n" for text in reasons)


def test_the_line_sets_variables_and_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("docker", "run", "--gpus", "all", "-e", "VLLM_USE_FLASHINFER_MOE_FP4=0", "vllm/vllm-openai:v1")
    line = (*line, "--enable-expert-parallel", "-dp", "2", "--config", "a.yaml")
    code, text = answer(capsys, sm="12.0", release="0.21.0", command=line)
    assert code == 0
    assert " · dp+ep · " in text.splitlines()[0]
    assert "MARLIN is selected (VLLM_USE_FLASHINFER_MOE_FP4=0)" in text
    assert "--gpus" not in text
    assert "the file that --config names was not read" in text
    assert "--all2all-backend allgather_reducescatter, the default" in text
    # A variable on the command line overrides the environment.
    environ = {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}
    text = answer(capsys, environ, sm="12.0", release="0.21.0", command=line)[1]
    assert "selected (VLLM_USE_FLASHINFER_MOE_FP4=0)" in text


def test_secrets_and_terminal_codes_stay_out(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"VLLM_MY_API_TOKEN": "s3cret-value", "VLLM_ODD": "\x1b[31mred"}
    line = ("vllm", "serve", "m", "--moe-backend", "\x1b[31mred", "--my-api-key=s3cret-value")
    for format in ("table", "json", "markdown"):
        code, text = answer(capsys, environ, sm="12.0", format=format, command=line)
        assert code == 1
        assert "s3cret" not in text
        assert "--my-api-key" in text
        assert "\x1b" not in text


def test_every_option_reaches_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    options = ["--sm", "10.0", "--scheme", "fp8-block", "--release", "0.21.0", "--ep", "--dp"]
    options += ["--activation", "silu", "--backend", "DEEPGEMM", "--no-ask", "--format", "json"]
    line = ["--", "vllm", "serve", "m", "-h"]  # the server's own flag, not ours
    with mock.patch.dict(os.environ, {"VLLM_NVFP4_MOE_BACKEND": "MARLIN"}, clear=True):
        assert cli.main(["backends", *options, "-o", str(file), *line]) == 1
    shown = capsys.readouterr()
    report = json.loads(file.read_text(encoding="utf-8"))
    assert shown.out == ""
    assert f"{report['chosen']} is selected (automatic); written to" in shown.err
    asked = [report[name] for name in ("release", "capability", "scheme", "parallel", "activation")]
    assert asked == ["0.21.0", "10.0", "fp8-block", "dp+ep", "silu"]
    assert (report["schema_version"], report["command"], report["exit_code"]) == (1, "backends", 1)
    assert report["moedoctor"]
    assert all(candidate["reason"] and candidate["source"] for candidate in report["candidates"])
    assert report["request"]["how"] == "--moe-backend deep_gemm"
    assert report["settings"][0]["problem"] == "unknown"
    assert report["disagreements"] == []


def test_the_installed_vllm_is_asked_and_its_disagreement_is_a_finding(capsys, monkeypatch):
    machine(monkeypatch, capability="12.0", vllm="0.21.0+cu130")
    monkeypatch.setattr(command, "find_libraries", lambda *where: {"flashinfer": True})
    heard = Heard("MARLIN", None, {"FLASHINFER_CUTLASS": "no", "MARLIN": ""}, ("a note",))
    monkeypatch.setattr(backend_agreement, "ask_all", lambda *arguments, **options: (heard,))
    code, text = answer(capsys)
    assert code == 1
    assert "The installed vLLM disagrees with the tables" in text
    assert "selected: MARLIN; the tables say FLASHINFER_CUTLASS" in text
    assert "a note" in text
    assert "disagrees" not in answer(capsys, release="0.20.0")[1]  # it is not the release that is installed
    assert answer(capsys, ask=False)[0] == 0

    def silent(*arguments: Any, **options: Any) -> tuple[Heard, ...]:
        raise AgreementError("the installed vllm did not answer within 180 s")

    monkeypatch.setattr(backend_agreement, "ask_all", silent)
    code, text = answer(capsys)
    assert code == 0
    assert "did not answer within 180 s" in text


def test_an_installed_build_that_is_no_release_answers_by_its_own_code(capsys, monkeypatch):
    machine(monkeypatch, capability="12.0", vllm="0.34.1.dev5")
    refusals = {"BRAND_NEW": "", "MARLIN": "", "VLLM_CUTLASS": "kernel is too old"}
    heard = Heard("BRAND_NEW", None, refusals, ("a note",))
    monkeypatch.setattr(backend_agreement, "ask_all", lambda given, **options: [heard for _ in given])
    code, text = answer(capsys)
    lines = text.splitlines()
    own = "vllm 0.34.1.dev5 is not in the tables: its own code was asked; settings are judged as in 0.33.0"
    assert (code, lines[0]) == (0, own)
    assert lines[2].startswith("vLLM 0.34.1.dev5 · ")
    assert "BRAND_NEW is selected (its own code)" in text
    assert "kernel is too old" in text
    assert "disagrees" not in text
    assert json.loads(answer(capsys, scheme=None, format="json")[1])["schemes"][0]["chosen"] == "BRAND_NEW"
    assert answer(capsys, strict=True)[0] == 2
    refused = Heard(None, "nothing fits", {"MARLIN": "no"})
    monkeypatch.setattr(backend_agreement, "ask_all", lambda given, **options: [refused for _ in given])
    code, text = answer(capsys)
    assert (code, "vLLM 0.34.1.dev5 does not start: nothing fits" in text) == (1, True)
    assert "does not start: nothing fits" in answer(capsys, command=["vllm", "--moe-backend", "new"])[1]
    assert "answered for 0.33.0" in answer(capsys, ask=False)[1].splitlines()[0]


def test_libraries_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    packages, tools = {"flashinfer", "humming"}, set[str]()
    monkeypatch.setattr(command, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(command.shutil, "which", lambda name: name if name in tools else None)

    def flashinfer(release: str, **environ: str) -> bool:
        return command.find_libraries(release, environ)["flashinfer"]

    others = dict.fromkeys(("flashinfer", "b12x", "hpc", "quark"), False)
    assert command.find_libraries("0.21.0", {}) == {**others, "humming": True}
    assert flashinfer("0.21.0", VLLM_HAS_FLASHINFER_CUBIN="1")
    assert not flashinfer("0.21.0", VLLM_HAS_FLASHINFER_CUBIN="0")
    tools.add("nvcc")
    assert flashinfer("0.31.0")
    assert not flashinfer("0.32.0"), "ninja is missing"
    tools.update(("ninja", "/opt/cuda/bin/nvcc"))
    assert flashinfer("0.32.0")
    tools.discard("nvcc")
    assert not flashinfer("0.32.0")
    assert flashinfer("0.32.0", CUDA_HOME="/opt/cuda")
    assert not flashinfer("0.31.0", CUDA_HOME="/opt/cuda"), "it did not look there yet"
    packages.update(("flashinfer_cubin", "deep_gemm"))
    assert command.find_libraries("0.18.0", {})["deep_gemm"] is True
    assert flashinfer("0.31.0")


TRITON = ["vllm", "serve", "Qwen/Qwen3-30B-A3B", "--moe-backend", "triton"]


def test_where_the_scheme_is_not_known_there_is_an_answer_for_each(capsys):
    request: dict[str, Any] = {"sm": "9.0", "release": "0.33.0", "scheme": None, "format": "json"}
    code, text = answer(capsys, command=TRITON, backend="MARLIN", **request)
    document = json.loads(text)
    assert (code, document["scheme"]) == (0, None)
    chosen = {each["scheme"]: each["chosen"] for each in document["schemes"]}
    assert (chosen["bf16"], chosen["nvfp4"]) == ("TRITON", None)
    assert len(document["request"]) == len(chosen)
    shown = answer(capsys, command=TRITON, **{**request, "format": "table"})[1]
    assert "does not start" not in shown
    assert "not known" in shown
    impossible = ["vllm", "serve", "x" * 100_000]
    code, text = answer(capsys, command=impossible, **{**request, "format": "table"})
    assert code == 0
    assert len(text) < 5_000


@pytest.mark.parametrize(
    ("quantization", "options", "scheme"),
    [
        (None, [], "bf16"),
        (None, ["--quantization", "fp8"], "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, [], "nvfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [], "fp8-block"),
        ({"quant_method": "fp8"}, [], "fp8"),
        ({"quant_method": "mxfp4"}, [], "mxfp4"),
        ({"quant_method": "awq"}, [], None),
        (None, ["--quantization", "modelopt_fp4"], "nvfp4"),
    ],
)
def test_the_scheme_of_the_checkpoint_or_the_command_line(quantization, options, scheme, tmp_path, capsys):
    config = {} if quantization is None else {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = ["vllm", "serve", str(tmp_path), *options]
    request: dict[str, Any] = {"sm": "9.0", "release": "0.33.0", "scheme": None, "format": "json"}
    assert json.loads(answer(capsys, command=command, **request)[1])["scheme"] == scheme


def test_settings_that_the_answer_does_not_consider_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["vllm", "serve", "m", "-tp", "2", "-dp", "2", "-ep", "--port", "8000"]
    line += ["--all2all-backend", "deepep_low_latency"]
    line += ["-sc", '{"method": "mtp"}', "--linear-backend", "cutlass", "--dtype", "bfloat16"]
    environ = {"VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "FLASHINFER_LOGLEVEL": "1"}
    request: dict[str, Any] = {"sm": "12.1", "release": "0.33.0", "command": line}
    code, text = answer(capsys, environ, **request)
    assert code == 0
    left_out = "--all2all-backend, -sc, --linear-backend, VLLM_BATCH_INVARIANT"
    assert text.splitlines()[1].endswith(f"; not considered: {left_out}")
    assert "the default" not in text, "the line names another --all2all-backend"
    assert "not looked at: --port, VLLM_LOGGING_LEVEL, FLASHINFER_LOGLEVEL" in text
    document = json.loads(answer(capsys, environ, **request, format="json")[1])
    problems = {finding["setting"]: finding["problem"] for finding in document["settings"]}
    assert problems["VLLM_BATCH_INVARIANT=1"] == "not_considered"
    plain = answer(capsys, sm="12.1", release="0.33.0")[1]
    assert "not considered" not in plain
    assert "not about linear layers or a draft model" in plain


@pytest.mark.parametrize(
    ("sm", "advice"),
    [
        ("12.1", "use --moe-backend flashinfer_cutlass instead of"),
        ("10.0", "use --moe-backend flashinfer_cutlass (or flashinfer_trtllm) instead of"),
        ("9.0", None),
    ],
)
def test_no_backend_is_advised_that_the_table_refuses(sm, advice, capsys):
    text = answer(capsys, {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}, sm=sm, release="0.33.0")[1]
    if advice is None:
        assert "Next: use" not in text
        assert "flashinfer_cutlass, flashinfer_trtllm would not work here" in text
    else:
        assert advice in text


@pytest.mark.parametrize(
    ("config", "activation", "note"),
    [
        ({"hidden_act": "silu"}, "silu", "taken as silu: hidden_act silu in config.json"),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, "swigluoai", "swigluoai: model_type gpt_oss"),
        ({"text_config": {"mlp_hidden_act": "relu2"}}, "relu2_no_mul", "mlp_hidden_act relu2"),
        ({"hidden_act": "tanh"}, "silu", "not known (hidden_act tanh in config.json): taken as silu"),
        ({}, "silu", "names none): taken as silu; name it with --activation"),
    ],
)
def test_the_activation_comes_from_the_checkpoint_or_is_said_to_be_assumed(
    config: dict[str, Any], activation: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    request: dict[str, Any] = {"sm": "12.0", "release": "0.33.0", "command": ["vllm", "serve", str(tmp_path)]}
    text = answer(capsys, **request)[1]
    assert text.splitlines()[0].endswith(f" · {activation}")
    assert note in text


@pytest.mark.parametrize(
    ("release", "sm", "named"),
    [("0.24.0", "12.0", True), ("0.27.1", "12.1", True), ("0.28.0", "12.0", False), ("0.24.0", "9.0", False)],
)
def test_a_deepgemm_without_kernels_for_the_gpu_is_named(release, sm, named, capsys):
    command = ["vllm", "serve", "m", "--moe-backend", "triton"]  # other layers have blocks, too
    for more in ({}, {"command": command}):
        text = answer(capsys, sm=sm, scheme="fp8-block", release=release, **more)[1]
        assert ("MD031: this vLLM selects DeepGEMM" in text) is named
    more = {"sm": sm, "scheme": "fp8-block", "release": release}
    assert "MD031" not in answer(capsys, {"VLLM_USE_DEEP_GEMM": "0"}, **more)[1]
