"""GPU code on the disk: the targets in it, what a GPU can run, and the report of the command."""

import re
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from cuda_fakes import fake_cubin, fake_tool
from hypothesis import given, settings

from moedoctor import environment
from moedoctor.commands.audit import audit as audit_command
from moedoctor.commands.options import PAGE_FORMATS
from moedoctor.diagnose.cuda.audit import NO_TOOL, audit, judge_images
from moedoctor.diagnose.cuda.device_code import Image, list_images, read_cubin_target
from moedoctor.diagnose.cuda.instructions import find_compilers, try_instruction
from moedoctor.diagnose.cuda.jit_cache import build_images
from moedoctor.fixes.arch.targets import Target
from moedoctor.processes.cuda_tools import Tool, find_tools

CUOBJDUMP = next(reversed(find_tools(["cuobjdump"])), None)
COMPILERS = find_compilers()
NVCC = next((tool for tool in find_tools(["nvcc"]) if shutil.which("c++") and tool.cuda >= (12, 9)), None)
needs_ptxas = pytest.mark.skipif(not COMPILERS, reason="needs ptxas: pip install triton, or CUDA on PATH")
needs_toolkit = pytest.mark.skipif(
    NVCC is None or CUOBJDUMP is None, reason="needs nvcc of CUDA 12.9 or later, a C++ compiler and cuobjdump"
)

GPU = (12, 0)


def image(text: str) -> Image:
    """``sass 120f`` or ``ptx 80``."""
    kind, target = text.split()
    return Image(kind, Target.parse(target))


def ninja(*codes: str) -> str:
    """Return a build file with the flags that FlashInfer writes."""
    flags = " $\n    ".join(f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes)
    return f"cuda_cflags = $common_cflags $\n    -O3 $\n    {flags}\n\nrule compile\n"


def cache(folder: Path, release: str, targets: str, module: str, *codes: str) -> Path:
    """A module of a FlashInfer cache, its build file alone."""
    path = folder / ".cache" / "flashinfer" / release / targets / "cached_ops" / module
    path.mkdir(parents=True)
    (path / "build.ninja").write_text(ninja(*codes))
    return path


@pytest.mark.parametrize(
    ("images", "gpu", "fate"),
    [
        (["sass 120f"], (12, 1), "loads"),
        (["sass 120a"], (12, 1), "missing"),
        (["sass 90a", "ptx 90a"], (10, 0), "missing"),
        (["sass 90a", "ptx 90"], (10, 0), "compiled"),
        (["sass 80", "sass 120"], (12, 0), "loads"),
        ([], (12, 0), None),
    ],
)
def test_what_a_gpu_can_run(images: list[str], gpu: tuple[int, int], fate: str | None) -> None:
    assert judge_images([image(text) for text in images], gpu) == fate


def test_the_target_of_a_cubin_is_read() -> None:
    assert str(read_cubin_target(fake_cubin(120))) == "120"
    assert str(read_cubin_target(fake_cubin(120, flags=0x600780A))) == "120a"  # as CUDA 12.9 writes it
    assert str(read_cubin_target(fake_cubin(90, abi=7))) == "90"
    assert str(read_cubin_target(fake_cubin(90, abi=7, flags=0x5A0D5A))) == "90a"
    for name in ("120a", "120f", "120"):  # as CUDA 13 does: the suffix in the note alone
        cubin = fake_cubin(120, command_line=f"ptxas\0-arch sm_{name} -m 64 \0")
        assert str(read_cubin_target(cubin)) == name
    assert str(read_cubin_target(fake_cubin(120, command_line="-arch sm_90a -m 64"))) == "120"
    linked = fake_cubin(120, command_line="nvlink\0-arch=sm_121f -arch=sm_120f ")
    assert str(read_cubin_target(linked)) == "120f"
    assert read_cubin_target(b"") is None
    assert read_cubin_target(b"\x7fELF" + bytes(60)) is None
    assert read_cubin_target(fake_cubin(120)[:40]) is None
    assert read_cubin_target(fake_cubin(5)) is None
    other = bytearray(fake_cubin(120))
    other[18] = 62  # an x86 program
    assert read_cubin_target(bytes(other)) is None


@settings(max_examples=300)
@given(cut=st.integers(0, 400), edits=st.dictionaries(st.integers(0, 399), st.integers(0, 255), max_size=8))
def test_a_damaged_cubin_never_raises(cut: int, edits: dict[int, int]) -> None:
    blob = bytearray(fake_cubin(120, command_line="-arch sm_120f -m 64")[: 400 - cut])
    for place, value in edits.items():
        if place < len(blob):
            blob[place] = value
    target = read_cubin_target(bytes(blob))
    assert target is None or target.major > 0


@needs_ptxas
@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
def test_cubins_of_real_compilers(compiler: Tool, tmp_path: Path) -> None:
    tried = 0
    for name in ("75", "90", "90a", "100", "100a", "100f", "120", "120a", "120f", "121a", "121f"):
        target = Target.parse(name)
        if not try_instruction(compiler, target, None).accepted:
            continue
        version = {(12, 8): "8.7", (12, 9): "8.8"}.get(compiler.cuda, "9.0")
        text = f".version {version}\n.target sm_{name}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
        (tmp_path / "k.ptx").write_text(text)
        command = [compiler.path, f"-arch=sm_{name}", "k.ptx", "-o", f"{name}.cubin"]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert read_cubin_target((tmp_path / f"{name}.cubin").read_bytes()) == target
        tried += 1
    assert tried >= 4
    (item,) = audit([tmp_path], GPU, None)
    assert (item.source, item.verdict) == ("cubins", "loads")
    assert sum(image.count for image in item.images) == tried


@needs_toolkit
@pytest.mark.slow
def test_a_library_of_the_real_compiler(tmp_path: Path) -> None:
    sass, ptx = "90a 120f", "80 120f"
    (tmp_path / "k.cu").write_text("__global__ void k(float *p) { p[threadIdx.x] = 1.f; }\n")
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in sass.split()]
    flags += [f"-gencode=arch=compute_{name},code=compute_{name}" for name in ptx.split()]
    subprocess.run([NVCC.path, "-c", "k.cu", "-o", "k.o", *flags], cwd=tmp_path, check=True)
    listed = {(image.kind, str(image.target)) for image in list_images(tmp_path / "k.o", CUOBJDUMP)}
    assert listed == {("sass", name) for name in sass.split()} | {("ptx", name) for name in ptx.split()}


HEADER = """
Fatbin {kind} code:
================
arch = sm_{name}
code version = [1,8]
host = linux
compile_size = 64bit
"""


def fake_cuobjdump(folder: Path, pieces: dict[str, list[str]], shown: str = "") -> Tool:
    """cuobjdump 12.8, which lists every piece without its ``f`` and takes it out as it is."""
    listing, extracting = "", ""
    for kind, names in pieces.items():
        for place, name in enumerate(names):
            plain = name.removesuffix("f")
            listing += HEADER.format(kind="elf" if kind == "sass" else "ptx", name=plain)
            number = plain.rstrip("a")
            if kind == "sass":
                cubin = fake_cubin(int(number), command_line=f"-arch sm_{name} -m 64")
                (folder / f"piece{place}").write_bytes(cubin)
                extracting += (
                    f'[ "$2" = sm_{number} ] && cp {folder}/piece{place} {place}.sm_{number}.cubin\n'
                )
            else:
                (folder / f"text{place}").write_text(f"\n\n.version 9.0\n.target sm_{name}\n")
                extracting += f'[ "$2" = sm_{number} ] && cp {folder}/text{place} {place}.sm_{number}.ptx\n'
    (folder / "listing").write_text(listing)
    listed = shown or f"cat {folder}/listing"
    body = f'case "$1" in -xelf|-xptx) {extracting or ":"}\nexit 0;; *) {listed};; esac'
    path = fake_tool(folder, "cuobjdump", "12.8", body)
    return Tool("cuobjdump", str(path), (12, 8), "12.8.93")


def library(path: Path) -> Path:
    path.write_bytes(b"\x7fELF" + bytes(100))
    return path


def test_suffixes_that_the_tool_drops_are_read_from_the_pieces(tmp_path: Path) -> None:
    pieces = {"sass": ["80", "90a", "120f", "120a", "120f", "120", "121a"], "ptx": ["80", "120f"]}
    listed = list_images(library(tmp_path / "k.so"), fake_cuobjdump(tmp_path, pieces))
    shown = " ".join(f"{image.kind}:{image.target}x{image.count}" for image in listed)
    assert shown == "ptx:80x1 ptx:120fx1 sass:80x1 sass:90ax1 sass:120x1 sass:120ax1 sass:120fx2 sass:121ax1"


def test_a_suffix_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path, {"sass": ["120f", "120f"]})
    (tmp_path / "piece1").write_bytes(b"not a cubin")
    (image,) = list_images(library(tmp_path / "k.so"), tool)
    assert (str(image.target), image.count) == ("120", 2)


def test_a_file_without_device_code(tmp_path: Path) -> None:
    says = "echo \"cuobjdump info    : File 'k.so' does not contain device code\" >&2; exit 255"
    tool = fake_cuobjdump(tmp_path, {}, says)
    (item,) = audit([library(tmp_path / "k.so")], GPU, tool)
    assert (item.verdict, item.note, item.skipped) == (None, "no device code", None)


def test_a_tool_that_fails_skips_the_file_with_its_words(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path, {}, "echo 'cuobjdump fatal   : Invalid fatbin header' >&2; exit 1")
    (item,) = audit([library(tmp_path / "k.so")], GPU, tool)
    assert (item.verdict, item.skipped) == (None, "cuobjdump fatal   : Invalid fatbin header")


def test_without_the_tool_libraries_are_skipped_and_the_rest_is_read(tmp_path: Path) -> None:
    module = cache(tmp_path, "0.6.8", "120f", "fused_moe_120", "120f")
    library(module / "fused_moe_120.so")
    (tmp_path / "one.cubin").write_bytes(fake_cubin(120))
    items = {item.source: item for item in audit([tmp_path], GPU, None)}
    assert items["shared object"].skipped == NO_TOOL
    assert items["build file"].verdict == "loads"
    assert items["cubins"].verdict == "loads"


def test_a_wheel_is_read_file_by_file(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path, {"sass": ["90a"]})
    with zipfile.ZipFile(tmp_path / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/_C.abi3.so", b"\x7fELF" + bytes(100))
        wheel.writestr("cubins/a.cubin", fake_cubin(120, command_line="-arch sm_120a -m 64"))
        wheel.writestr("../../b.cubin", fake_cubin(100))
        wheel.writestr("vllm/readme.txt", "no code")
    items = audit([tmp_path / "some-1.0-py3-none-any.whl"], GPU, tool)
    assert [
        (item.path.partition("!")[2], [str(i.target) for i in item.images], item.verdict) for item in items
    ] == [("vllm/_C.abi3.so", ["90a"], "missing"), ("*.cubin", ["100", "120a"], "loads")]
    assert not (tmp_path.parent / "b.cubin").exists()


def test_build_files() -> None:
    images, unreadable = build_images(ninja("120f", "120f", "90a"))
    assert [str(image.target) for image in images] == ["90a", "120f"]
    assert unreadable == ()
    flags = "-gencode=arch=compute_90,code=[sm_90,compute_90] -gencode arch=compute_80,code=sm_80"
    images = build_images(flags)[0]
    assert [f"{item.kind} {item.target}" for item in images] == ["ptx 90", "sass 80", "sass 90"]
    assert build_images(ninja("120+PTX"))[1] == ("compute_120+PTX", "sm_120+PTX")
    assert build_images("nothing here") == ((), ())


def test_kernels_built_without_their_suffix(tmp_path: Path) -> None:
    cache(tmp_path, "0.6.6", "120", "fused_moe_120", "120")
    cache(tmp_path, "0.6.6", "120f", "fused_moe_120", "120f")
    cache(tmp_path, "0.6.7", "120", "sampling", "120")
    items = audit([tmp_path], GPU, None)
    assert [(item.module, item.verdict, bool(item.lacks)) for item in items] == [
        ("FlashInfer 0.6.6 fused_moe_120", "loads", True),
        ("FlashInfer 0.6.6 fused_moe_120", "loads", False),
        ("FlashInfer 0.6.7 sampling", "loads", False),
    ]
    assert "mma_mxf4nvf4" in items[0].lacks
    assert all(item.verdict is None for item in audit([tmp_path], None, None))


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    cache(tmp_path / "elsewhere", "0.6.6", "120", "fused_moe_120", "120")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    assert audit([tmp_path / "here"], GPU, None) == ()


def run(
    paths: list[Path], capsys: pytest.CaptureFixture[str], sm: str | None = "12.0", format: str = "table"
) -> tuple[int, str]:
    code = audit_command(paths, sm, format)
    return code, capsys.readouterr().out


def test_the_command_finds_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache(tmp_path, "0.7.2.post1", "120a", "fused_moe_120", "120a")
    assert run([tmp_path], capsys, "12.0")[0] == 0
    code, text = run([tmp_path], capsys, "12.1")
    assert code == 1
    assert re.search(r"– +SASS 120a +missing", text)
    assert "1 missing" in text
    assert "no kernel image" in text


def test_the_command_finds_kernels_without_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache(tmp_path, "0.6.6", "120", "fused_moe_120", "120")
    code, text = run([tmp_path], capsys)
    assert code == 1
    assert "loads, but compiled without tensormap_replace" in text
    assert "FLASHINFER_CUDA_ARCH_LIST=12.0f" in text


@pytest.mark.parametrize(
    ("gpu", "flag"), [("12.0", "sm_120f"), ("9.0", "sm_90a"), ("8.0", "sm_80"), ("12.1", "sm_121a")]
)
def test_the_advised_target_has_the_suffix_that_moe_kernels_need(gpu, flag, tmp_path, capsys):
    (tmp_path / "build.ninja").write_text(ninja("100a"))
    assert re.search(rf"code={flag}(?!\w)", run([tmp_path], capsys, gpu)[1])


def test_large_build_files_and_folders_end_soon_in_a_short_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"{number}x{number}" for number in range(20_000)]
    (tmp_path / "build.ninja").write_text(ninja(*names, *(f"{number}a" for number in range(70, 999))))
    for number in range(500):
        cache(tmp_path, "0.6.6", "90a", f"gemm_{number}", "90a")
    cache(tmp_path, "0.6.6", "120", "fused_moe_120", "120")
    start = time.monotonic()
    code, text = run([tmp_path], capsys, "9.0")
    assert time.monotonic() - start < 20  # quadratic code took over two minutes
    assert (code, text.count("\n") <= 200, len(text) < 40_000) == (0, True, True)
    assert re.search(r"compute_0x0, .* and 39,\d\d\d more", text)
    assert "472 more files: of the 502 files, none is wrong" in text
    code, text = run([tmp_path], capsys, "8.0")
    assert (code, text.count("\n") <= 200) == (1, True)
    assert "of the 502 files, 500 are missing or lack" in text


def test_without_a_gpu_targets_are_listed(tmp_path, capsys, monkeypatch):
    cache(tmp_path, "0.6.6", "120a", "fused_moe_120", "120a")
    monkeypatch.setattr(environment, "collect", lambda: {"capability": None})
    code, text = run([tmp_path], capsys, None)
    assert (code, "SASS 120a" in text, "targets" in text) == (0, True, True)
    monkeypatch.setattr(environment, "collect", lambda: {"capability": "12.1"})
    assert run([tmp_path], capsys, None)[0] == 1


@pytest.mark.parametrize("format", PAGE_FORMATS)
def test_home_folders_are_not_shown_and_an_empty_folder_says_so(format, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, text = run([tmp_path], capsys, "12.0", format)
    assert code == 0
    assert format == "json" or "no shared object, cubin, wheel or build file found" in text
    cache(tmp_path, "0.6.6", "120f", "fused_moe_120", "120f")
    text = run([tmp_path], capsys, "12.0", format)[1]
    assert str(tmp_path) not in text
    assert "~/.cache/flashinfer/0.6.6" in text
