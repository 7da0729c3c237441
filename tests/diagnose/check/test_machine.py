"""The vLLM releases that use mapped host memory, and those that use copies."""

import pytest

from moedoctor.diagnose.check.machine import DISABLE_PIN, DISABLE_UVA, WSL_PIN, offload_path

NEW = "6.6.87.2-microsoft-standard-WSL2"
OLD = "4.19.104-microsoft-standard"


@pytest.mark.parametrize(
    ("vllm", "wsl", "kernel", "variables", "uva", "pins"),
    [
        ("0.33.0", False, "6.8.0", {}, True, True),
        ("0.33.0", False, "6.8.0", {DISABLE_UVA: "1"}, False, True),
        ("0.33.0", False, "6.8.0", {DISABLE_PIN: "1"}, True, False),
        ("0.33.0", False, "6.8.0", {DISABLE_UVA: "0", DISABLE_PIN: ""}, True, True),
        ("0.33.0", False, "6.8.0", {DISABLE_UVA: "yes"}, True, True),
        ("0.23.0", True, NEW, {WSL_PIN: "1"}, False, False),
        ("0.24.0", True, NEW, {WSL_PIN: "1"}, True, True),
        ("0.24.0", True, NEW, {}, False, False),
        ("0.24.0", True, NEW, {WSL_PIN: "1", DISABLE_UVA: "1"}, False, True),
        ("0.24.0", True, OLD, {WSL_PIN: "1"}, False, False),
        ("0.24.0", True, None, {WSL_PIN: "1"}, False, False),
        ("0.33.0", None, NEW, {}, None, None),
        ("0.33.0", None, NEW, {DISABLE_UVA: "1"}, False, None),
        ("local", True, NEW, {}, None, None),
        (None, True, NEW, {DISABLE_UVA: "1"}, None, None),
    ],
)
def test_path(vllm, wsl, kernel, variables, uva, pins):
    path = offload_path(vllm, wsl=wsl, kernel=kernel, variables=variables)
    assert (path.uva.value, path.pins.value) == (uva, pins)
    assert path.uva.reason
    assert path.pins.reason
