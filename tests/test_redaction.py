"""Names of persons and machines and secrets are removed from reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.redaction import HIDDEN, Redactor

ALICE = Redactor(home="/data/people/alice", user="alice", host="gpubox7.lab.example")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_API_KEY", "short"),
        ("VLLM_HOST_IP", "fe80::1"),
        ("NCCL_COMM_ID", "node3:29500"),
        ("NCCL_HOSTID", "rack-12"),
        ("VLLM_S3_SECRET_ACCESS", "x"),
        ("CUDA_TOKEN", "x"),
    ],
)
def test_a_setting_named_like_a_secret_or_a_host_is_hidden(name: str, value: str) -> None:
    assert ALICE.setting(name, value) == HIDDEN


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/data/people/alice/models", "~/models"),
        ("/home/bob/.cache:/opt/cuda", "~/.cache:/opt/cuda"),
        ("/Users/bob/x", "~/x"),
        ("/root/.cache", "~/.cache"),
        ("/rootfs/x", "/rootfs/x"),
        ("/scratch/alice/run", f"/scratch/{HIDDEN}/run"),
        ("malice", "malice"),
        ("gpubox7", HIDDEN),
        ("see gpubox7.lab.example now", f"see {HIDDEN} now"),
        ("tcp://10.0.0.7:29500", f"tcp://{HIDDEN}"),
        ("https://me:pw@mirror.example/x", f"https://{HIDDEN}"),
        ("10.0.0.7", HIDDEN),
        ("GPU-8f6d2a10-1111-2222-3333-444455556666,GPU-9a1b", f"GPU-{HIDDEN},GPU-{HIDDEN}"),
        ("MIG-GPU-8f6d2a10-1111/1/0", f"MIG-GPU-{HIDDEN}"),
        ("hf_AbCdEfGhIjKlMnOp", HIDDEN),
        ("model/hf_quant_config.json: no quant_algo", "model/hf_quant_config.json: no quant_algo"),
        ("0123456789abcdef0123456789abcdef", HIDDEN),
        ("aB3aB3aB3aB3aB3aB3aB3aB3", HIDDEN),
    ],
)
def test_identifying_text_is_hidden_in_values(value: str, shown: str) -> None:
    assert ALICE.setting("VLLM_X", value) == shown


@pytest.mark.parametrize(
    "value",
    [
        "",
        "1",
        "0,1",
        "9.0 10.0a 12.0+PTX",
        "FLASHINFER_CUTLASS_MXFP4_MXFP8_BF16",
        "throughput",
        "/usr/local/cuda-13.0",
    ],
)
def test_settings_that_explain_a_failure_stay_readable(value: str) -> None:
    assert ALICE.setting("VLLM_X", value) == value


@pytest.mark.parametrize("user", ["root", "vllm", "7", "1000", "ab", ""])
def test_a_common_user_name_hides_nothing(user: str) -> None:
    text = f"vllm took 1000 of 7 for ab ({user})"
    assert Redactor(user=user).text(text) == text


def test_a_long_value_is_cut_and_says_so() -> None:
    shown = ALICE.setting("VLLM_X", "a b " * 200)
    assert len(shown) == 301
    assert shown.endswith("…")


def test_the_redactor_of_a_process_takes_user_and_home_from_its_environment() -> None:
    redactor = Redactor.of({"HOME": "/srv/carol/", "LOGNAME": "carol"}, "box")
    assert redactor == Redactor(home="/srv/carol", user="carol", host="box")
    assert Redactor.of({"HOME": "/srv/carol"}, "").user == "carol"
    assert Redactor.of({}, "") == Redactor()


@given(st.text())
def test_any_text_comes_out_writable_and_redacting_twice_changes_nothing(text: str) -> None:
    once = ALICE.text(text + "\udc80")
    once.encode("utf-8")
    assert ALICE.text(once) == once


def test_own_files_are_named_from_the_package_on() -> None:
    from moedoctor import redaction
    from moedoctor.runner import child

    frame = f'  File "{child.__file__}", line 71, in _perform'
    assert redaction.Redactor().text(frame) == '  File "moedoctor/runner/child.py", line 71, in _perform'
    other = '  File "/opt/site/vllm/moedoctor/runner/child.py", line 1'
    assert redaction.Redactor().text(other) == other
