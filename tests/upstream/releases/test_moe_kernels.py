"""Arguments of releases that differ, filled by name; and a library that does not load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.results import UnavailableError
from moedoctor.upstream.releases import moe_kernels
from moedoctor.upstream.releases.moe_kernels import MoeKernels, fill
from moedoctor.upstream.releases.wheel import KernelError

OLD = (
    "(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
    "Tensor gating_output, bool renormalize"
)
SCHEMAS = {
    "without_bias": f"{OLD}) -> ()",
    "0.18.0": f"{OLD}, Tensor? bias) -> ()",
    "0.33.0": f"{OLD}, Tensor? bias, float routed_scaling_factor, Tensor? is_padding) -> ()",
    "defaults": f"{OLD}, Tensor? bias, Tensor? later=None) -> ()",
    "unknown": f"{OLD}, Tensor? bias, Tensor tid2eid) -> ()",
}


def schema(release: str) -> Any:
    return torch._C.parse_schema(f"_moe_C::topk_sigmoid{SCHEMAS[release]}")


def values(bias: torch.Tensor | None = None) -> dict[str, Any]:
    names = ("topk_weights", "topk_indices", "token_expert_indices", "gating_output", "is_padding")
    return dict.fromkeys(names) | {"renormalize": True, "bias": bias, "routed_scaling_factor": 1.0}


@pytest.mark.parametrize("release", ["without_bias", "0.18.0", "0.33.0", "defaults"])
def test_arguments_are_those_of_the_release(release: str) -> None:
    filled = fill(schema(release), values())
    expected = [argument.name for argument in schema(release).arguments if argument.name != "later"]
    assert list(filled) == expected


@pytest.mark.parametrize(
    ("release", "bias", "reason"),
    [("without_bias", torch.zeros(4), "takes no correction bias"), ("unknown", None, "takes tid2eid")],
)
def test_what_a_release_cannot_take_skips_the_case(release, bias, reason):
    with pytest.raises(UnavailableError, match=reason):
        fill(schema(release), values(bias))


def test_a_library_that_does_not_load_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "moe_C.so"
    file.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(KernelError, match="does not load under torch") as caught:
        MoeKernels.load(file)
    assert torch.__version__.split("+")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value), "reports go to others"


class Ops:
    """Replaces ``torch.ops._moe_C`` of a release and records its arguments."""

    def __init__(self, release: str) -> None:
        self.called: dict[str, Any] = {}
        outer = self

        class Operator:
            class default:  # noqa: N801
                _schema = schema(release)

            def __call__(self, **arguments: Any) -> None:
                outer.called = arguments
                arguments["topk_weights"].fill_(0.5)
                arguments["topk_indices"].fill_(3)

        self.topk_softmax = self.topk_sigmoid = Operator()


@pytest.mark.parametrize("release", ["0.18.0", "0.33.0"])
def test_outputs_come_from_the_operator(release: str) -> None:
    ops = Ops(release)
    routed = MoeKernels(Path("moe_C.so"), ops).topk_sigmoid(torch.zeros(2, 8), 4, renormalize=True)
    assert routed.weights.tolist() == [[0.5] * 4] * 2
    assert (routed.ids.tolist(), routed.ids.dtype) == ([[3] * 4] * 2, torch.int32)
    assert ops.called["renormalize"] is True


@pytest.mark.parametrize(
    ("bias", "reason"),
    [(torch.zeros(8), "has no operator grouped_topk"), (None, "no form without a correction bias")],
)
def test_grouped_topk_that_a_release_lacks_skips_the_case(bias: torch.Tensor | None, reason: str) -> None:
    kernels = MoeKernels(Path("moe_C.so"), Ops("0.18.0"))
    with pytest.raises(UnavailableError, match=reason):
        kernels.grouped_topk(torch.zeros(2, 8), 4, num_groups=2, topk_groups=1, bias=bias)


def test_the_cuda_runtime_that_is_missing_is_loaded_and_the_kernels_again(tmp_path, monkeypatch):
    """For a release built for CUDA 12, torch raises an error whose cause is the loader's message."""
    library, runtime = tmp_path / "moe_C.so", tmp_path / "libcudart.so.12"
    for file in (library, runtime):
        file.write_bytes(b"\x7fELF")
    loaded: list[str] = []

    def load_library(path: str) -> None:
        if not loaded:
            try:
                raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")
            except OSError as error:
                raise OSError(f"Could not load this library: {path}") from error
        loaded.append(path)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setattr(moe_kernels.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    moe_kernels.load_library(library)
    assert loaded == [str(runtime), str(library)]

    loaded.clear()
    runtime.unlink()
    with pytest.raises(KernelError, match=r"put libcudart\.so\.12 beside it or install nvidia-cuda-runtime"):
        MoeKernels.load(library)
