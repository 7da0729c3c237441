"""The probe compiled by the real nvcc against a stub of FlashInfer's header, loaded, and called on the CPU.

What FlashInfer itself does is measured where there is a GPU: `moedoctor run MD011 --flashinfer X.Y.Z=PATH`.
"""

import ctypes
from pathlib import Path

import pytest
from cuda_fakes import fake_tool
from vllm_stub import write_files

from moedoctor.processes.cuda_tools import Tool, find_tools
from moedoctor.upstream.flashinfer.probe import _load_library
from moedoctor.upstream.flashinfer.probe_build import build, plan_build
from moedoctor.upstream.flashinfer.source import _SOURCES, KERNELS, FlashInferSource, find_source
from moedoctor.upstream.releases.wheel import KernelError

HEADER = """
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdexcept>
#include "linked.h"
namespace tensorrt_llm::kernels::cutlass_kernels {
struct MOEParallelismConfig {
  int tp_size, tp_rank, ep_size, ep_rank;
  MOEParallelismConfig(int a, int b, int c, int d) : tp_size(a), tp_rank(b), ep_size(c), ep_rank(d) {}
};
#ifndef FROM_THE_RELEASE
#error the release's own flags are missing
#endif
int64_t computeNumTokensPerBlock(int64_t const tokens, int64_t const experts) { return tokens + linked(); }
bool fusedBuildExpertMapsSortFirstToken(int const*, int*, int*, int64_t*, int64_t const tokens,
                                        int const experts, int const top_k, int const start,
                                        int const end, bool, cudaStream_t) {
  if (end != start + experts) throw std::runtime_error("the last expert is wrong");
  if (top_k == 99) throw std::runtime_error("no such top_k");
  return tokens <= 256;
}
void threeStepBuildExpertMapsSortFirstToken(int const*, int*, int*, int*, int64_t*, int*, int*, int*,
                                            int64_t const, int64_t const, int64_t const, int const, bool,
                                            cudaStream_t) {}
template <class A, class B, class C>
void finalizeMoeRoutingKernelLauncher(B const*, A*, C const* bias, float const*, int const*, int const*,
                                      int const*, int64_t const*, int64_t const, int64_t const,
                                      int64_t const, int64_t const, int64_t const,
                                      MOEParallelismConfig ranks, bool const all_to_all, bool,
                                      cudaStream_t) {
  if (bias != nullptr || !all_to_all || ranks.ep_rank != 1 || ranks.ep_size != 2)
    throw std::runtime_error("finalize got something else");
}
}
"""
CORE = 'common_nvcc_flags = []\nsm90a_nvcc_flags = ["-DFROM_THE_RELEASE"] + common_nvcc_flags\n'
MOE = "def gen_cutlass_fused_moe_sm90_module():\n    nvcc_flags = sm90a_nvcc_flags + []\n"


HAS_NVCC = any(tool.cuda >= (12, 8) for tool in find_tools(["nvcc"]))
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="needs nvcc of CUDA 12.8 or later")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlashInferSource:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {"jit/core.py": CORE, "jit/fused_moe.py": MOE}
    files |= {f"data/{KERNELS}": HEADER, "data/include/linked.h": "int linked();\n"}
    for part in _SOURCES:
        text = '#include "linked.h"\nint linked() { return 7; }\n' if part.stem == "logger" else ""
        files[f"data/{part}"] = text
    write_files(tmp_path / "flashinfer", files)
    return find_source("0.6.6", tmp_path)


@needs_nvcc
@pytest.mark.slow
def test_the_probe_compiles_is_kept_and_calls_what_the_header_has(source: FlashInferSource) -> None:
    plan = plan_build(source, "90a")
    path = build(plan)
    assert path == plan.target
    before = path.stat().st_mtime_ns
    assert build(plan).stat().st_mtime_ns == before
    assert [file.name for file in path.parent.iterdir()] == ["probe.so"]
    library = _load_library(str(path))
    assert library.moedoctor_probe_tokens_per_block(300, 1) == 307  # from a source that is only linked
    maps: list[int | None] = [None] * 4
    assert library.moedoctor_probe_fused(*maps, 256, 8, 2, 16, None) == 1
    assert library.moedoctor_probe_fused(*maps, 257, 8, 2, 16, None) == 0
    assert library.moedoctor_probe_fused(*maps, 1, 8, 99, 0, None) == -1
    assert library.moedoctor_probe_error() == b"no such top_k"
    assert library.moedoctor_probe_three_step(*[None] * 8, 1, 8, 2, 0, None) == 1
    assert library.moedoctor_probe_finalize(*[None] * 7, 1, 8, 2, 8, 2, 1, 1, None) == 1
    assert library.moedoctor_probe_finalize(*[None] * 7, 1, 8, 2, 8, 2, 1, 0, None) == -1
    assert isinstance(library, ctypes.CDLL)


FAILED_BUILDS = {
    "linker": (
        "ld: cannot find -lcudart_static: No such file\ncollect2: error: ld returned 1 exit status",
        "cannot find -lcudart_static",
    ),
    "error in a path": (
        "In file included from /cache/error/probe.cu:4:\n/x/moe.cuh:5:2: error: #error another release",
        "#error another release",
    ),
    "numbered": ("/x/errors/moe.cuh(7)\n/x/moe.cuh(7): error #20: T is undefined", "T is undefined"),
    "nvcc": ("nvcc fatal   : Unsupported gpu architecture 'compute_120f'", "Unsupported gpu architecture"),
}


@pytest.mark.parametrize("name", FAILED_BUILDS)
def test_a_failed_build_shows_the_line_that_names_the_cause(name, source, tmp_path, monkeypatch):
    printed, cause = FAILED_BUILDS[name]
    nvcc = fake_tool(tmp_path / "bin", "nvcc", "13.0", f"cat >&2 <<'end'\n{printed}\nend\nexit 1")
    tool = Tool("nvcc", str(nvcc), (13, 0), "13.0.88")
    monkeypatch.setattr("moedoctor.upstream.flashinfer.probe_build.find_tools", lambda names: (tool,))
    with pytest.raises(KernelError, match=cause) as error:
        build(plan_build(source, "90a"))
    assert len(str(error.value).splitlines()) == 1
    assert not list(plan_build(source, "90a").target.parent.iterdir())


@needs_nvcc
def test_another_release_architecture_header_or_flag_is_another_file(source: FlashInferSource) -> None:
    first = plan_build(source, "90a").target
    assert plan_build(source, "100a").target != first
    assert plan_build(FlashInferSource("0.6.7", source.package), "90a").target != first
    source.kernels.write_text(HEADER + "// changed\n")
    second = plan_build(source, "90a").target
    assert second != first
    (source.package / "jit" / "core.py").write_text(CORE.replace("THE_RELEASE", "ANOTHER"))
    assert plan_build(source, "90a").target != second


def test_the_error_without_nvcc_names_the_next_step(source, monkeypatch):
    monkeypatch.setattr("moedoctor.upstream.flashinfer.probe_build.find_tools", lambda names: ())
    with pytest.raises(KernelError, match="set CUDA_HOME"):
        plan_build(source, "90a")
