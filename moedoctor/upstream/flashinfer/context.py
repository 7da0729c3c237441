"""Asks the installed FlashInfer, without a GPU, for which targets it would compile.

FlashInfer chooses its targets in `CompilationContext` (0.5.0 to 0.7.2.post1), from
FLASHINFER_CUDA_ARCH_LIST or from the GPUs that torch reports. Here it runs with our values for that variable,
the GPU and the CUDA release. Everything is put back afterwards.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

from packaging.version import Version

from moedoctor.fixes.arch.flashinfer import ArchReading, list_moe_majors
from moedoctor.fixes.arch.targets import Capability, CudaVersion, show
from moedoctor.results import UnavailableError

_LIST = "FLASHINFER_CUDA_ARCH_LIST"
_CODE = re.compile(r"-gencode=arch=compute_[^,]+,code=(?:sm|compute)_(\S+)")


@dataclass(frozen=True)
class FlashInferContext:
    release: str
    context: Any
    """``flashinfer.compilation_context.CompilationContext``."""
    extensions: Any
    """The module ``flashinfer.jit.cpp_ext``, which looks up the CUDA release."""

    @classmethod
    def installed(cls) -> FlashInferContext:
        """Import FlashInfer. Raises UnavailableError if it is absent or does not import."""
        try:
            release = importlib.metadata.version("flashinfer-python")
        except importlib.metadata.PackageNotFoundError:
            raise UnavailableError("flashinfer is not installed here") from None
        # The import reads the list, and makes a cache folder named after it with a log inside.
        with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
            variables = {_LIST: "8.0", "FLASHINFER_WORKSPACE_BASE": folder}
            with mock.patch.dict(os.environ, variables):
                try:
                    import flashinfer.compilation_context
                    import flashinfer.jit.cpp_ext
                except Exception as error:
                    message = f"flashinfer {release} does not import: {type(error).__name__}: {error}"
                    raise UnavailableError(message) from error
        return cls(release, flashinfer.compilation_context.CompilationContext, flashinfer.jit.cpp_ext)

    def resolve(self, capability: Capability, cuda: CudaVersion, arch_list: str | None) -> ArchReading:
        """Return the MoE module's targets for one GPU of `capability` and CUDA release `cuda`, or the error.

        `arch_list` is the value of FLASHINFER_CUDA_ARCH_LIST, None if it is not set.
        """
        import torch

        with (
            mock.patch.dict(os.environ, {_LIST: arch_list or ""}),
            mock.patch.object(torch.cuda, "device_count", return_value=1),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            mock.patch.object(self.extensions, "get_cuda_version", return_value=Version(show(cuda))),
        ):
            if arch_list is None:
                del os.environ[_LIST]
            try:
                majors = list(list_moe_majors(capability))
                flags = self.context().get_nvcc_flags_list(supported_major_versions=majors)
            except Exception as error:
                return ArchReading((), f"{type(error).__name__}: {error}")
        return ArchReading(tuple(dict.fromkeys(match[1] for match in map(_CODE.fullmatch, flags) if match)))
