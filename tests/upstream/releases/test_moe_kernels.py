"""Kernels of releases: from wheels and shared objects, with arguments that differ, filled by name."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.results import UnavailableError
from moedoctor.upstream.releases import moe_kernels, wheel
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


ELF = b"\x7fELF" + bytes(60)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_wheel(path: Path, member: str = "vllm/_moe_C.abi3.so", data: bytes = ELF) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("vllm/__init__.py", "")
        file.writestr(member, data)
    return path


@pytest.mark.parametrize("name", ["_moe_C.abi3.so", "_moe_C_stable_libtorch.abi3.so"])
def test_a_wheel_is_unpacked_once_into_the_cache(tmp_path: Path, cache: Path, name: str) -> None:
    file = make_wheel(tmp_path / "vllm-0.19.1-cp38-abi3-linux.whl", f"vllm/{name}")
    wheel.check_kernels(file)
    library = wheel.find_shared_object(file)
    assert library.read_bytes() == ELF
    assert library.is_relative_to(cache)
    assert library.name == name
    library.write_bytes(b"kept")
    assert wheel.find_shared_object(file).read_bytes() == b"kept"
    assert [file.name for file in library.parent.iterdir()] == [name], "no half-written file is left"


def test_another_wheel_of_the_same_name_is_not_mistaken_for_it(tmp_path: Path) -> None:
    file = make_wheel(tmp_path / "vllm.whl")
    first = wheel.find_shared_object(file)
    make_wheel(file, data=ELF + b"other")
    assert wheel.find_shared_object(file) != first


def test_a_shared_object_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "moe_C.so"
    file.write_bytes(ELF)
    wheel.check_kernels(file)
    assert wheel.find_shared_object(file) == file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.so", None, "no such file"),
        ("text.so", b"hello", "no ELF header"),
        ("empty.so", b"", "no ELF header"),
        ("broken.whl", b"PK\x03\x04 nonsense", "cannot be read as a wheel"),
    ],
)
def test_what_cannot_hold_kernels_is_refused(tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    for check in (wheel.check_kernels, wheel.find_shared_object):
        with pytest.raises(KernelError, match=message) as caught:
            check(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("member", ["vllm/_C.abi3.so", "../vllm/_moe_C.abi3.so", "x/vllm/_moe_C.abi3.so"])
def test_a_wheel_without_the_kernel_library_is_refused(tmp_path: Path, member: str) -> None:
    file = make_wheel(tmp_path / "vllm.whl", member)
    with pytest.raises(KernelError, match="no vllm/_moe_C"):
        wheel.check_kernels(file)


def test_cuda_runtime_beside_the_kernels_comes_first(tmp_path: Path) -> None:
    runtime = tmp_path / "libcudart.so.12"
    runtime.write_bytes(ELF)
    assert wheel.find_cuda_runtimes(tmp_path / "moe_C.so", "12")[0] == runtime
