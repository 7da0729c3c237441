"""Each collector of `check` fails once: the other facts stay, and nothing private is shown."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
from machine_fakes import H200, VLLM_018, probes, sources

from moedoctor.diagnose.check.check import Probes, check
from moedoctor.environment import Sources
from moedoctor.reporters.json import to_document, to_json
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.pages.check import make_check_page
from moedoctor.reporters.table import to_text
from moedoctor.upstream.releases.collectors import Collected

SECRET = "no entry to /home/alice/models on workstation-7, hf_abcdefghijklmnop123"
SOURCES = [name for name in vars(Sources()) if name != "environ"]
PROBES = [name for name in vars(Probes()) if name != "requires"]
broken = Mock(side_effect=OSError(SECRET))


def machine(**replaced: Any) -> Sources:
    made = sources(VLLM_018, gpu=H200, wsl=True, torch_cuda="12.9")
    return Sources(**{**vars(made), **replaced})


def texts(result: Any) -> tuple[str, ...]:
    page = make_check_page(result)
    return to_json(to_document(result)), to_text(page), to_markdown(page)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_fails(name: str) -> None:
    result = check(machine(**{name: broken}), probes())
    assert result.exit_code in (1, 2)
    if name not in ("host", "exists", "package_folder"):
        assert result.environment["collector_errors"], name
    for text in texts(result):
        assert "alice" not in text
        assert "hf_abc" not in text
        assert name == "host" or "workstation-7" not in text
    if name not in ("package_version", "read_text"):
        assert {"MD001", "MD003"} <= {finding.id for finding in result.findings}


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_that_fails(name: str) -> None:
    result = check(machine(), probes(**{name: broken}))
    assert {"MD001", "MD003", "MD011"} <= {finding.id for finding in result.findings}
    data = to_document(result)
    shown = json.dumps(data["environment"])
    assert "OSError: no entry to ~" in shown, name
    for text in texts(result):
        assert "alice" not in text
        assert "workstation-7" not in text
        assert "hf_abc" not in text


def test_a_collector_that_says_why_it_cannot_is_a_fact() -> None:
    silent = Collected(error="no answer within 30 s")
    result = check(machine(), probes(vllm=lambda: silent))
    assert result.environment["collectors"]["vllm"] == {"error": "no answer within 30 s"}
    assert "vllm says" in to_text(make_check_page(result))
    assert "nothing: no answer within 30 s" in to_text(make_check_page(result))
    assert result.environment["collectors"]["flashinfer"]["FlashInfer"]


def test_nothing_private_is_shown() -> None:
    environ = {
        "HOME": "/home/alice",
        "USER": "alice",
        "VLLM_API_KEY": "sk-12345678901234567890",
        "VLLM_CACHE_ROOT": "/home/alice/.cache/vllm",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0 /home/alice",
        "VLLM_NVFP4_MOE_BACKEND": "/home/alice/backend",
        "VLLM_HOST_IP": "10.1.2.3",
        "MOEDOCTOR_FIXES": "backend,/home/alice/x",
        "HF_TOKEN": "hf_abcdefghijklmnop123",
    }
    result = check(machine(environ=environ), probes())
    assert {"MD010", "MD004"} <= {finding.id for finding in result.findings}
    for text in texts(result):
        for private in ("alice", "sk-123", "10.1.2.3", "hf_abc", "workstation-7"):
            assert private not in text


def test_an_observer_that_fails_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    from moedoctor.diagnose.check import check as module

    monkeypatch.setattr(module, "OBSERVERS", {"MD004": broken})
    result = check(machine(), probes())
    assert "OSError" in result.environment["collector_errors"]["observations for MD004"]
    assert "MD001" in {finding.id for finding in result.findings}
