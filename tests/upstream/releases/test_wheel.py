"""Kernels from wheels and shared objects, and refused files."""

import zipfile
from pathlib import Path

import pytest

from moedoctor.upstream.releases import wheel
from moedoctor.upstream.releases.wheel import KernelError

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
