"""vLLM's MoE backends through vLLM's own oracle, conversion and kernel."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from moedoctor.bench.moe import backends as registry
from moedoctor.bench.moe.parity import check_parity
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Variant
from moedoctor.reference.moe_layer import make_layer, make_problem
from moedoctor.results import UnavailableError
from moedoctor.upstream.moe_backends import backends

SHAPE = LayerShape(512, 256, 16, 4)
RUN_ON_HOPPER = [
    variant for variant in registry.UPSTREAM if variant.name in ("MARLIN", "HUMMING", "EMULATION", "TRITON")
]  # what an H200 has without building anything


@pytest.mark.parametrize("variant", registry.UPSTREAM, ids=lambda variant: variant.label)
def test_a_cpu_has_none_of_them(variant: Variant) -> None:
    assert registry.create(variant).unavailable(SHAPE, "cpu") == "needs an NVIDIA GPU that torch can use"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_a_layer_is_refused_with_the_reason() -> None:
    with pytest.raises(UnavailableError, match="vLLM"):
        registry.create(registry.UPSTREAM[0]).prepare(make_layer(SHAPE, "nvfp4"))


SCALES = {"fp8": "each matrix", "fp8-block": "each 128 x 128 weights"}


@pytest.mark.parametrize(("quantization", "weights"), [("fp8", "fp8-block"), ("fp8-block", "fp8")])
def test_scales_of_another_kind_are_refused(monkeypatch, quantization, weights):
    monkeypatch.setattr(backends, "_start", lambda device, fresh: None)
    message = f"needs a scale for {SCALES[quantization]}; this layer has one for {SCALES[weights]}"
    with pytest.raises(UnavailableError, match=message):
        backends.VllmBackend(Variant("TRITON", quantization)).prepare(make_layer(SHAPE, weights))


def test_a_gate_that_ends_within_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = backends.VllmBackend(Variant("TRITON", "fp8-block"))
    reason = backend.unavailable(LayerShape(512, 192, 16, 4), "cuda:0")
    assert reason == "needs an intermediate size that is a multiple of 128; got 192"


def test_flashinfer_is_not_left_to_compile_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.VllmBackend(Variant("FLASHINFER_CUTLASS", "bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_explain_unsupported", lambda shape, device: None)
    monkeypatch.delenv(backends.JIT_VARIABLE, raising=False)
    assert backends.JIT_VARIABLE in (backend.unavailable(SHAPE, "cuda:0") or "")
    monkeypatch.setenv(backends.JIT_VARIABLE, "1")
    assert backend.unavailable(SHAPE, "cuda:0") is None


_NEEDS_A_GPU = re.compile(r"not compiled with CUDA|'_OpNamespace' '_C' object has no|'NoneType' and 'int'")
"""Errors of a conversion of weights without a GPU, after vLLM's functions took their arguments."""


@pytest.mark.upstream
def test_the_installed_release_takes_what_its_functions_are_given() -> None:
    """Each backend is prepared as on an H200, as far as that goes without one."""
    code = """if True:
        import json, sys
        from moedoctor.upstream.selection import substitute
        substitute.install({}).use((9, 0))
        from moedoctor.bench.moe import backends as registry
        from moedoctor.models.layer_shape import LayerShape
        from moedoctor.reference.moe_layer import make_layer
        from moedoctor.results import UnavailableError
        ended = {}
        for variant in registry.UPSTREAM:
            try:
                registry.create(variant).prepare(make_layer(LayerShape(256, 128, 8, 2), variant.quantization))
                ended[variant.label] = "prepared"
            except UnavailableError as error:
                ended[variant.label] = f"refused: {error}"
            except Exception as error:
                ended[variant.label] = f"{type(error).__name__}: {error}"
        ended["children"] = open("/proc/thread-self/children").read()
        print(json.dumps(ended))
    """
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    ended = json.loads(answer.stdout.splitlines()[-1])
    assert ended.pop("children") == "", "HUMMING's import starts a compiler unless it is told not to"
    if Version(importlib.metadata.version("vllm")) >= Version("0.21.0"):
        triton = {label: end for label, end in ended.items() if label.startswith("TRITON ")}
        assert triton == dict.fromkeys(("TRITON fp8", "TRITON fp8-block", "TRITON bf16"), "prepared")
    assert all("needs" not in reason for reason in ended.values()), "no argument is missing"
    others = [text for text in ended.values() if text != "prepared" and not text.startswith("refused: ")]
    assert [text for text in others if not _NEEDS_A_GPU.search(text)] == [], ended


@pytest.mark.gpu
@pytest.mark.upstream
@pytest.mark.parametrize("variant", RUN_ON_HOPPER, ids=lambda variant: variant.label)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_backend_is_right_and_every_planted_fault_is_noticed(variant: Variant, activation: str) -> None:
    backend = registry.create(variant)
    shape = LayerShape(512, 256, 16, 4, activation)
    reason = backend.unavailable(shape, "cuda:0")
    if reason is not None:
        pytest.skip(reason)
    layer = make_layer(shape, variant.quantization, device="cuda:0")
    problem = make_problem(layer, 33, variant.activations, device="cuda:0")
    result = check_parity(backend, problem)
    assert result.agreement.reason is None
    assert result.missed == ()
