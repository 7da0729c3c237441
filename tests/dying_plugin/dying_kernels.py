"""Faults that a GPU really reports, for the tests that need one."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

_PTX = """.version 8.7
.target {target}
.address_size 64
.visible .entry nothing() {{ ret; }}
"""


@triton.jit
def _write_anywhere(address):
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)


def illegal_memory_access() -> None:
    """Store far outside of every allocation."""
    _write_anywhere[(1,)](0x7F0000000000)
    torch.cuda.synchronize()


def illegal_instruction() -> None:
    """Run a kernel whose machine code is overwritten with an invalid instruction."""
    major, minor = torch.cuda.get_device_capability()
    image = bytearray(_cubin(f"sm_{major}{minor}"))
    start, size = _code_section(image)
    image[start : start + size] = b"\xff" * size
    _load_and_launch(bytes(image))


def device_assert() -> None:
    """Index out of range, which a device-side assertion of torch catches."""
    torch.zeros(3, device="cuda")[torch.tensor([10], device="cuda")]
    torch.cuda.synchronize()


def no_kernel_image() -> None:
    """Load a cubin of another architecture."""
    _load_and_launch(_cubin("sm_120"))


def _cubin(target: str) -> bytes:
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = next(file for name in ("ptxas-blackwell", "ptxas") if (file := folder / name).exists())
    with tempfile.TemporaryDirectory() as temporary:
        source, cubin = Path(temporary, "a.ptx"), Path(temporary, "a.cubin")
        source.write_text(_PTX.format(target=target))
        subprocess.run([os.fspath(ptxas), f"-arch={target}", "-o", cubin, source], check=True)
        return cubin.read_bytes()


def _code_section(image: bytes) -> tuple[int, int]:
    """Return (offset, size) of the section ``.text.nothing`` of an ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + index * entry) for index in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        if image[strings + name :].startswith(b".text.nothing\0"):
            return offset, size
    raise LookupError("no .text.nothing")


def _load_and_launch(image: bytes) -> None:
    torch.zeros(1, device="cuda")  # makes the context
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
    _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, b"nothing"))
    _check(driver, driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    _check(driver, driver.cuCtxSynchronize())


def _check(driver: ctypes.CDLL, error: int) -> None:
    if error:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"CUDA driver: {name.value.decode() if name.value else error}")


def answers() -> None:
    """Show that the context of this process works."""
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
