"""The address at which a GPU reads pinned host memory. Imports no Triton."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from moedoctor.kernels.device_guard import make_current

_MAPPED = 2
"""cudaHostRegisterMapped"""


class PinError(RuntimeError):
    """Memory could not be page-locked, or a GPU cannot read it."""


def find_device_address(memory: torch.Tensor, device: torch.device) -> int:
    """Return the address at which kernels on `device` read the pinned host tensor `memory`.

    On Linux it is the host's address. On WSL and Windows it is another one for memory of `cudaHostRegister`
    (cudaDevAttrCanUseHostPointerForRegisteredMem is 0 there), and a kernel that reads at the host's address
    ends with "an illegal memory access was encountered" (sgl-project/sglang#40232). For the CPU, on which
    Triton's interpreter runs, it is the host's. Raises PinError if `device` cannot read the memory.
    """
    if device.type != "cuda" or not memory.nbytes:
        return memory.data_ptr()
    address = ctypes.c_void_p()
    runtime = _load_runtime()
    with make_current(device):
        host = ctypes.c_void_p(memory.data_ptr())
        code = runtime.cudaHostGetDevicePointer(ctypes.byref(address), host, ctypes.c_uint(0))
        if code:
            runtime.cudaGetLastError()  # takes the error, which torch would raise at its next launch
    if code or not address.value:
        raise PinError(
            f"{device} cannot read {memory.nbytes} bytes of host memory in place: cudaHostGetDevicePointer "
            f"failed with error {code}. Is the memory pinned? WSL and Windows may not map pinned memory; "
            "use access='copy' for offload, engine='host' for the expert cache"
        )
    return address.value


def pin(memory: torch.Tensor, size: int, device: torch.device) -> bool:
    """Pin `size` bytes of host memory from `memory` on, so that kernels on `device` use its own address.

    Return whether that worked. WSL and Windows may refuse, or give the device another address. For the CPU
    there is nothing to do.
    """
    if device.type != "cuda":
        return True
    try:
        runtime = _load_runtime()
        with make_current(device):
            start = ctypes.c_void_p(memory.data_ptr())
            if runtime.cudaHostRegister(start, ctypes.c_size_t(size), ctypes.c_uint(_MAPPED)):
                runtime.cudaGetLastError()
                return False
        return find_device_address(memory, device) == memory.data_ptr()
    except PinError:
        return False


@cache
def _load_runtime() -> Any:
    """Return the CUDA runtime library that torch has loaded. Raises PinError if there is none."""
    major = (torch.version.cuda or "").split(".")[0]
    names = (f"libcudart.so.{major}", f"libcudart.so.{major}.0", f"cudart64_{major}.dll", "libcudart.so")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise PinError(
        f"no kernel can read host memory, as the CUDA runtime was not found: expected {' or '.join(names)}; "
        "use access='copy' for offload, engine='host' for the expert cache"
    )
