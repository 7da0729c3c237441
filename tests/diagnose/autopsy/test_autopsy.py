"""Core dumps of an H200 (driver 580.159) are read as cuda-gdb 13.0 reads them; hostile ones end in one line.

The dumps in `dumps` are real ones of planted faults, of which only what names the fault was kept: tables, the
first warps that faulted, and of the images the symbols and line tables. `misaligned_store` also has registers
of the first threads, the kernel's parameter and its code.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import struct
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.cli import main
from moedoctor.diagnose.autopsy import owners
from moedoctor.diagnose.autopsy.core_dump import read_core_dump
from moedoctor.diagnose.autopsy.dump_request import DumpRequest
from moedoctor.diagnose.autopsy.line_table import find_line
from moedoctor.diagnose.autopsy.owners import demangle, find_owner
from moedoctor.diagnose.cuda import elf
from moedoctor.diagnose.cuda.elf import ElfError
from moedoctor.processes import cuda_tools
from moedoctor.reporters.schemas import make_schema

DUMPS = Path(__file__).parent / "dumps"
PLACE = [16, 1, 1], [128, 1, 1], [3, 0, 0], [96, 0, 0]
GATHER = ("gather_expert", "illegal address", *PLACE, "dump_case.py:14")
FAULTS = {
    "triton_graph": ("Triton", *GATHER),
    "light": ("Triton", *GATHER),
    "vllm_topk": (
        *("vLLM", "vllm::moe::topkGating", "illegal address"),
        *([256, 1, 1], [32, 4, 1], [8, 0, 0], [0, 1, 0], None),
    ),
    "cublas": (
        *("cuBLAS", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "illegal address"),
        *([2, 66, 1], [384, 1, 1], [0, 4, 0], [256, 0, 0], None),
    ),
    "device_assert": (
        *("PyTorch", "at::native::index_elementwise_kernel", "device assertion"),
        *([1, 1, 1], [128, 1, 1], [0, 0, 0], [0, 0, 0], None),
    ),
    "misaligned_store": (
        *(None, "misaligned_store", "misaligned address"),
        *([2, 1, 1], [32, 1, 1], [0, 0, 0], [0, 0, 0], None),
    ),
    "overflow_stack": (
        *(None, "overflow_stack", "address out of range"),
        *([2, 1, 1], [32, 1, 1], [0, 0, 0], [0, 0, 0], None),
    ),
}
"""Owner, and as cuda-gdb names them: kernel, exception, grid, block size, block, thread and line."""
LOG = """[14:35] coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)
[14:35] coredump:   - PC 0x7fb9437a2000
[14:35] coredump:   #0\t0x7fb9437a2070\t_ZN4vllm3moe10topkGatingILi4E
"""
TRACEBACK = """Traceback (most recent call last):
  File "/srv/vllm/v1/worker/gpu_model_runner.py", line 7, in execute_model
    torch.cuda.synchronize()
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
"""


def unpack(folder: Path, name: str) -> Path:
    file = folder / f"{name}.core"
    file.write_bytes(lzma.decompress((DUMPS / f"{name}.xz").read_bytes()))
    return file


def examine(path: Path, capsys: pytest.CaptureFixture[str], code: int) -> Any:
    assert main(["autopsy", str(path), "--format", "json"]) == code
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, make_schema("autopsy"))
    return document


@pytest.mark.parametrize("name", FAULTS)
def test_a_dump_names_what_cuda_gdb_names(tmp_path, capsys, name):
    document = examine(unpack(tmp_path, name), capsys, 1)
    (fault,) = document["faults"]
    found = [
        (fault["owner"] or {"name": None})["name"],
        *(fault[key] for key in ("kernel", "exception", "grid", "block_size", "block", "thread")),
        fault["source"] and fault["source"].rpartition("/")[2],
    ]
    assert found == list(FAULTS[name])
    assert fault["function"] == ("deep" if name == "overflow_stack" else None)
    (examined,) = document["examined"]
    assert (examined["gpu"], examined["capability"], examined["cuda"]) == ("NVIDIA H200", "9.0", "13.0")


def test_only_a_kernel_of_moe_layers_sends_to_replay(tmp_path, capsys):
    (tmp_path / "a.moecapsule").write_bytes(b"")
    unpack(tmp_path, "vllm_topk")
    step = examine(tmp_path, capsys, 1)["next_steps"][0]
    assert f"moedoctor replay {tmp_path}/a.moecapsule --backend all" in step
    (step,) = examine(unpack(tmp_path, "cublas"), capsys, 1)["next_steps"]
    assert "Not only MoE layers use this kernel" in step
    main(["autopsy", str(tmp_path / "cublas.core"), "--format", "markdown"])
    assert f"**To do:** {step[:30]}" in capsys.readouterr().out


STORE = 0x0000040402007986, 0x000FE2000C101D04
"""STG.E.128 desc[UR4][R2.64+0x4], R4: the instruction that faulted."""
BASE = 0x7FEA1FE00000
"""R2 and R3 of the first thread, and the kernel's parameter."""


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (STORE, BASE + 4),
        ((0x00060FD002117FAE, 0x000FE8000B901C44), BASE - 0x30),  # LDGSTS.E [R17+0x60], [R2.64+-0x30]
        ((0x0100008002117FAE, 0x000FE8000B921844), BASE + 0x80),  # LDGSTS.E [R17+0x1000], [R2.64+0x80]
        ((0x00010006020C7981, 0x000EA2000C1E1D00), BASE + 0x100),  # LDG.E.128 R12, [R2.64+0x100]
        ((0xFFFFF8080200798E, 0x000FE2000C10E784), BASE - 8),  # RED.E.ADD [R2.64+-0x8], R8
        ((0x0000000802037981, 0x000EA2000C1E1900), None),  # LDG.E R3, [R2.64]: the address is overwritten
        ((0x0000040402147984, 0x000FE2000C101D04), None),  # LDS R20, [R2+0x4]: another memory
    ],
)
def test_the_address_of_the_instruction_at_fault(tmp_path, words, address):
    file = unpack(tmp_path, "misaligned_store")
    data = file.read_bytes()
    assert data.count(struct.pack("<2Q", *STORE)) == 1
    file.write_bytes(data.replace(struct.pack("<2Q", *STORE), struct.pack("<2Q", *words)))
    (fault,) = read_core_dump(file).faults
    assert (fault.address, fault.parameters) == (address, (BASE,))


def write_record(file: Path, **record: Any) -> None:
    """Write a capsule that has nothing but its record."""
    header = json.dumps({"__metadata__": {"record": json.dumps(record)}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((BASE, 64), "w13_weight of layer 1: the address is in it, at byte 4 of 64"),
        ((BASE, 1), "w13_weight of layer 1: the address is 3 bytes past its end"),
        ((BASE - 64, 80), "w13_weight of layer 1: the address is in it, at byte 68 of 80"),
        ((BASE + 2, 64), "w13_weight of layer 1: the address is in it, at byte 2 of 64"),
        ((BASE - 64, 64), None),
        (("x", 64), None),
    ],
)
def test_an_address_in_or_behind_a_recorded_tensor(tmp_path, capsys, place, says):
    unpack(tmp_path, "misaligned_store")
    for name in ("a", "b"):  # calls of the same layer
        addresses = {"w13_weight": place, "x": (1 << 40, 64)}
        write_record(tmp_path / f"{name}.moecapsule", layer="layer 1", addresses=addresses)
    main(["autopsy", str(tmp_path), "--format", "markdown"])
    shown = capsys.readouterr().out
    assert (says or "") in shown
    assert ("of layer 1" in shown) == bool(says)


def test_the_last_call_of_the_process_that_left_the_dump(tmp_path, capsys):
    unpack(tmp_path, "vllm_topk").rename(tmp_path / "cuda.77.core")
    write_record(tmp_path / "a-177.moecapsule", weights="recorded")
    write_record(tmp_path / "x-77.moecapsule", weights="none", reason="longer than the others")
    write_record(tmp_path / "y-77.moecapsule", weights="recorded")
    assert f"{tmp_path}/y-77.moecapsule --backend all" in examine(tmp_path, capsys, 1)["next_steps"][0]


DEBUGGER = """#!/bin/sh
for part; do
    case $part in "target cudacore "*) cmp "${part#target cudacore }" DUMP || exit 1; esac
done
[ "$(ulimit -v) $PWD $1 $2 $3 $5" = "8388608 / -nx -nh -batch set auto-load off" ] || exit 1
echo "Opening GPU coredump"
echo "#0  0x00007f in  topkGating<<<(256,1,1),(32,4,1)>>> ()"
echo "#0  0x00007f in topkGating<<<(256,1,1),(32,4,1)>>> ()"
echo "=> 0x7f <topkGating+288>:	FMNMX R9, R4, R5"
"""


def test_cuda_gdb_is_asked_within_bounds_and_without_scripts(tmp_path, capsys, monkeypatch):
    file, tool, path = unpack(tmp_path, "vllm_topk"), tmp_path / "cuda-gdb", os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cuda-gdb is not on PATH" in examine(file, capsys, 1)["examined"][0]["no_debugger"]
    tool.write_text(DEBUGGER.replace("DUMP", str(file)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    frame = "#0 0x00007f in topkGating<<<(256,1,1),(32,4,1)>>> ()"
    examined = examine(file, capsys, 1)["examined"][0]
    assert examined["debugger"] == [frame, "=> 0x7f <topkGating+288>: FMNMX R9, R4, R5"]
    tool.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    examined = examine(file, capsys, 1)["examined"][0]
    assert (examined["debugger"], examined["no_debugger"]) == ([], "cuda-gdb: broken")
    # One that starts what outlives it, prints without end, or hangs; the next dump gets no time.
    monkeypatch.setattr(cuda_tools, "_MAX_TEXT", 1 << 20)
    tool.write_text(f"#!/bin/sh\nsleep 99 &\necho $! > {tmp_path}/pid\nexec cat /dev/zero\n")
    begun = time.monotonic()
    assert "characters)" in examine(file, capsys, 1)["examined"][0]["no_debugger"]
    assert time.monotonic() - begun < 15
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
    unpack(tmp_path, "light")
    monkeypatch.setattr("moedoctor.diagnose.autopsy.autopsy.SECONDS", 0.3)
    tool.write_text("#!/bin/sh\nexec sleep 99\n")
    problems = [each["no_debugger"] for each in examine(tmp_path, capsys, 1)["examined"]]
    assert ["no answer" in problems[0], "the dumps before it" in problems[1]] == [True, True]


def test_a_trap_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = examine(unpack(tmp_path, "run_trap"), capsys, 0)
    assert not document["faults"]
    assert document["examined"][0]["running"] == ["run_trap"]


def test_an_exception_that_only_the_sm_has(tmp_path: Path) -> None:
    """The warps had ended: their lanes are without exception."""
    file = unpack(tmp_path, "triton_graph")
    data = bytearray(file.read_bytes())
    table, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    for index in range(count):
        kind, offset, size, row = struct.unpack_from("<4xI16x2Q16xQ", data, table + 64 * index)
        for place in range(offset, offset + size, row) if kind == 0x8000000F else ():
            data[place + 32 : place + 36] = bytes(4)
    file.write_bytes(data)
    (fault,) = read_core_dump(file).faults
    assert (fault.kernel.symbol, fault.code, fault.block, fault.warps) == ("gather_expert", 14, None, None)


@pytest.mark.parametrize(
    ("text", "faults", "note"),
    [
        (LOG, ["vllm::moe::topkGating"], None),
        (TRACEBACK, [], "may be innocent"),
        (TRACEBACK.splitlines()[-1], [], "does not name"),
        ("CUDA_LAUNCH_BLOCKING=1 vllm serve m\n" + TRACEBACK, [], "is the place"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4 GiB\n", [], "no kernel faulted"),
        ("INFO: Application startup complete.\n", [], "no error"),
    ],
)
def test_a_log(tmp_path, capsys, text, faults, note):
    file = tmp_path / "server.log"
    file.write_text(text)
    document = examine(file, capsys, int(bool(faults)))
    assert [fault["kernel"] for fault in document["faults"]] == faults
    assert (note or "") in (document["examined"][0]["note"] or "")
    assert any("asks CUDA for a core dump" in step for step in document["next_steps"]) == (
        note in ("may be innocent", "does not name")
    )


@settings(max_examples=25)
@given(st.data())
def test_a_damaged_dump_ends_in_one_line(tmp_path_factory, data):
    name = data.draw(st.sampled_from(["triton_graph", "overflow_stack", "run_trap", "misaligned_store"]))
    file = unpack(tmp_path_factory.mktemp("dump"), name)
    content = bytearray(file.read_bytes())
    used = [place for place, byte in enumerate(content) if byte]
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.sampled_from(used))
        value = data.draw(st.sampled_from([0, 1, 0x7F, 0xFF]))
        content[place : place + data.draw(st.sampled_from([1, 4, 8]))] = bytes([value]) * 8
    file.write_bytes(content[: data.draw(st.integers(64, len(content)))])
    with contextlib.suppress(ElfError):
        read_core_dump(file)


@pytest.mark.parametrize("size", [10 * 2**30, 2_600])
def test_a_sparse_or_cut_file_is_refused_at_once(tmp_path, capsys, size):
    file = unpack(tmp_path, "triton_graph")
    with file.open("r+b") as stream:
        stream.seek(40)
        stream.write(struct.pack("<Q", 4096))  # the section table: zeros of the hole
        stream.truncate(size)
    begun = time.monotonic()
    assert main(["autopsy", str(file)]) == 2
    assert time.monotonic() - begun < 5
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_no_dump_and_no_log_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = tmp_path / "core.77"
    core.write_bytes(b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<2H", 4, 62) + bytes(100))
    for file, says in [
        (tmp_path / "none", "cannot be read (no such file"),
        (core, "it is an ELF file, and not a core dump"),
    ]:
        assert main(["autopsy", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"moedoctor: {file}: {says}")


def test_dumps_stay_where_the_variable_of_the_user_sends_them(tmp_path: Path) -> None:
    folder = tmp_path / "[a]" / "host"
    folder.mkdir(parents=True)
    wanted = {"CUDA_COREDUMP_FILE": f"{tmp_path}/[a]/%h/mine.%p", "CUDA_COREDUMP_GENERATION_FLAGS": "mine"}
    request = DumpRequest.make(tmp_path, wanted)
    assert request.variables == {**wanted, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"}
    (folder / "mine.77").write_bytes(b"")
    assert request.keep(tmp_path) == [folder / "mine.77"]
    request.clear()
    assert list(tmp_path.iterdir()) == [tmp_path / "[a]"]


def test_a_line_table_beyond_the_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = unpack(tmp_path, "light")
    (fault,) = read_core_dump(file).faults
    assert fault.source
    monkeypatch.setattr(elf, "MOST_LINES", 100)
    (fault,) = read_core_dump(file).faults
    assert fault.source is None


@given(st.binary(max_size=200))
def test_any_line_table_is_read(data: bytes) -> None:
    find_line(struct.pack("<IHI", len(data) + 6, 2, 20) + data, 16)


@pytest.mark.parametrize(
    ("symbol", "source", "name", "owner", "moe"),
    [
        ("_ZN16marlin_moe_wna166MarlinILl1EEEvv", None, "marlin_moe_wna16::Marlin", "vLLM", True),
        ("fused_moe_kernel", "site/vllm/model_executor/layers/fused_moe/fused_moe.py:1", None, "vLLM", True),
        ("_matmul_ogs", "site/vllm/third_party/triton_kernels/matmul_ogs.py:1", None, "Triton", True),
        ("triton_poi_fused_add_0", None, None, "torch.compile", False),
        ("_Z17ncclDevKernel_Genv", None, "ncclDevKernel_Gen", "NCCL", False),
        ("$outer$_ZN2at6native12_GLOBAL__N_13addEv", None, "at::native::(anonymous)::add", "PyTorch", False),
        ("ampere_sgemm_32x32_sliced1x4_tn", None, None, "cuBLAS", False),
        ("my_kernel", None, None, None, False),
        ("cudnn_generated_fort_native_sm120_matMul_pointwise_knob_3", None, None, "cuDNN", False),
    ],
)
def test_whose_a_kernel_is(symbol, source, name, owner, moe):
    assert demangle(symbol) == (name or symbol)
    found = find_owner(symbol, source)
    assert (found.name if found else None, bool(found and found.moe)) == (owner, moe)
    assert (found.mended if found else None) == ("cuDNN 9.23.1 (MD033)" if owner == "cuDNN" else None)


def test_a_template_belongs_to_the_only_installed_package_that_has_it_with_these_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUTLASS's kernels have one name in several packages, so the whole mangled name decides."""
    symbol = "_ZN7cutlass13device_kernelIN4ours21cutlass_3x_group_gemmEEEvNT_6ParamsE"
    other = symbol.replace("4ours", "6theirs")
    names = {"vllm": [symbol], "torch": [symbol + "x", "x" + symbol, other], "flashinfer-python": [other]}
    for package, kernels in names.items():
        content = b"".join(b"\0" + kernel.encode() + b"\0" for kernel in kernels)
        (tmp_path / f"{package}.so").write_bytes(b"\x7fELF" + content)
    monkeypatch.setattr(owners, "_list_libraries", lambda package: [tmp_path / f"{package}.so"])
    owners._find_libraries.cache_clear()
    found = find_owner(symbol, None)
    assert found is not None
    assert (found.name, found.what, found.moe) == ("vLLM", "vLLM's product of experts, in vllm.so", True)
    assert find_owner(other, None) is None
    assert find_owner(symbol.replace("4ours", "7nobodys"), None) is None
