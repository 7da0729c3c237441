"""Sources of FlashInfer in wheels and folders, and the flags of their build, read as text."""

import zipfile
from pathlib import Path

import pytest
from vllm_stub import write_files

from moedoctor.upstream.flashinfer.source import KERNELS, check_source, find_source
from moedoctor.upstream.releases.wheel import KernelError

CORE = 'common_nvcc_flags = ["-DCOMMON"]\nsm90a_nvcc_flags = ["-gencode=x", "-DSM90"] + common_nvcc_flags\n'
MOE = """
def gen_cutlass_fused_moe_sm90_module(fast=False):
    nvcc_flags = sm90a_nvcc_flags + [
        "-DFIRST",
        "-DBLOCK" if is_cuda_version_at_least("12.8") else "",
    ]
    if rare():
        nvcc_flags.append("-DRARE")
    return nvcc_flags
"""
FILES = {
    f"flashinfer/data/{KERNELS}": "// kernels\n",
    "flashinfer/data/include/a.h": "",
    "flashinfer/jit/core.py": CORE,
    "flashinfer/jit/fused_moe.py": MOE,
    "flashinfer/__init__.py": "raise ImportError('is not to be imported')\n",
    "flashinfer_python-0.6.6.dist-info/METADATA": "Version: 0.6.6\n",
}


def folder(tmp_path: Path, **changed: str) -> Path:
    write_files(tmp_path, {**FILES, **changed})
    return tmp_path


def wheel(tmp_path: Path, **extra: str) -> Path:
    path = tmp_path / "flashinfer_python-0.6.6-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in {**FILES, **extra}.items():
            packed.writestr(name, text)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_and_the_package_in_it_are_the_same(tmp_path: Path) -> None:
    root = folder(tmp_path)
    source = find_source("0.6.6", root)
    assert source == find_source("0.6.6", root / "flashinfer")
    assert source.kernels.read_text() == "// kernels\n"
    assert source.includes == [root / "flashinfer/data/include", root / "flashinfer/data/csrc"]


def test_the_release_s_own_flags_are_read_and_rare_ones_left(tmp_path: Path) -> None:
    defines = find_source("0.6.6", folder(tmp_path)).list_defines()
    others = [flag for flag in defines if "FLASHINFER" not in flag]
    assert others == ["-DNDEBUG", "-DCOMMON", "-DSM90", "-DFIRST", "-DBLOCK"]


def test_flags_that_cannot_be_found_are_an_error(tmp_path: Path) -> None:
    root = folder(tmp_path, **{"flashinfer/jit/fused_moe.py": "def other():\n    pass\n"})
    with pytest.raises(KernelError, match="no list nvcc_flags"):
        find_source("0.6.6", root).list_defines()


def test_a_wheel_is_unpacked_once_and_only_what_is_needed(tmp_path: Path, cache: Path) -> None:
    path = wheel(tmp_path, **{"flashinfer/data/include/../../../../escaped.h": "no"})
    source = find_source("0.6.6", path)
    assert source.kernels.is_file()
    assert not (source.package / "__init__.py").exists()
    assert not list(tmp_path.rglob("escaped.h"))
    assert find_source("0.6.6", path) == source
    assert len(list((cache / "moedoctor" / "flashinfer").iterdir())) == 1


@pytest.mark.parametrize("check", [find_source, check_source])
def test_another_release_is_refused(tmp_path: Path, check: object) -> None:
    for path in (wheel(tmp_path), folder(tmp_path / "there")):
        with pytest.raises(KernelError, match=r"is release 0\.6\.6, not 0\.6\.7"):
            check("0.6.7", path)  # type: ignore[operator]


@pytest.mark.parametrize("check", [find_source, check_source])
def test_other_folders_are_refused_in_one_line(tmp_path: Path, check: object) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"no zip")
    for path in (tmp_path / "missing", tmp_path, broken):
        with pytest.raises(KernelError) as error:
            check("0.6.6", path)  # type: ignore[operator]
        assert len(str(error.value).splitlines()) == 1
