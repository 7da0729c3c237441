"""Which vLLM releases use mapped host memory and which use copies."""

import pytest

from moedoctor.diagnose.check.machine import offload_path
from tests.cases import load_cases

CASES = load_cases(__file__)

NEW = "6.6.87.2-microsoft-standard-WSL2"
OLD = "4.19.104-microsoft-standard"


@pytest.mark.parametrize(("vllm", "wsl", "kernel", "variables", "uva", "pins"), CASES["path"])
def test_path(
    vllm: str | None,
    wsl: bool | None,
    kernel: str | None,
    variables: dict[str, str],
    uva: bool | None,
    pins: bool | None,
) -> None:
    path = offload_path(vllm, wsl=wsl, kernel=kernel, variables=variables)
    assert (path.uva.value, path.pins.value) == (uva, pins)
    assert path.uva.reason
    assert path.pins.reason
