// Calls FlashInfer's own routing-map builders and its finalize launcher, and nothing else of it.
// Compiled against the headers of a named release; see moedoctor/upstream/flashinfer/probe_build.py.
// All pointers are device memory. No exception leaves a function: what was thrown is kept as text.

#include <cuda_bf16.h>

#include <cstdint>
#include <exception>
#include <string>

// Not inline in there, so this must be the only translation unit that includes it.
#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"

namespace probe {

namespace moe = tensorrt_llm::kernels::cutlass_kernels;

thread_local std::string said;

template <class Call>
int guarded(Call call) {
  try {
    return call();
  } catch (std::exception const& error) {
    said = error.what();
  } catch (...) {
    said = "an exception of an unknown type";
  }
  return -1;
}

}  // namespace probe

extern "C" {

char const* moedoctor_probe_error() { return probe::said.c_str(); }

// What the three-step sort takes as its block of tokens; its scratch memory is sized by it.
int64_t moedoctor_probe_tokens_per_block(int64_t tokens, int64_t experts) {
  return probe::moe::computeNumTokensPerBlock(tokens, experts);
}

// 1: the fused prologue took the call; 0: it declined; -1: it threw.
int moedoctor_probe_fused(int const* ids, int* row_of_permuted, int* permuted_of_row,
                          int64_t* first_offset, int64_t tokens, int experts, int top_k, int start,
                          void* stream) {
  return probe::guarded([&] {
    return static_cast<int>(probe::moe::fusedBuildExpertMapsSortFirstToken(
        ids, row_of_permuted, permuted_of_row, first_offset, tokens, experts, top_k, start,
        start + experts, false, static_cast<cudaStream_t>(stream)));
  });
}

int moedoctor_probe_three_step(int const* ids, int* permuted_experts, int* row_of_permuted,
                               int* permuted_of_row, int64_t* first_offset, int* counts,
                               int* counts_cumsum, int* blocked_rows, int64_t tokens, int experts,
                               int top_k, int start, void* stream) {
  return probe::guarded([&] {
    probe::moe::threeStepBuildExpertMapsSortFirstToken(
        ids, permuted_experts, row_of_permuted, permuted_of_row, first_offset, counts,
        counts_cumsum, blocked_rows, tokens, experts, top_k, start, false,
        static_cast<cudaStream_t>(stream));
    return 1;
  });
}

// The finalize kernel of an expert-parallel rank; with `all_to_all` and more than one rank the
// launcher takes the kernel that leaves rows without local experts unwritten.
int moedoctor_probe_finalize(void const* rows, void* out, float const* scales,
                             int const* permuted_of_row, int const* row_of_permuted, int const* ids,
                             int64_t const* first_offset, int64_t tokens, int64_t columns,
                             int64_t top_k, int64_t experts, int ep_size, int ep_rank,
                             int all_to_all, void* stream) {
  return probe::guarded([&] {
    using Bf16 = __nv_bfloat16;
    probe::moe::MOEParallelismConfig ranks(1, 0, ep_size, ep_rank);
    probe::moe::finalizeMoeRoutingKernelLauncher<Bf16, Bf16, Bf16>(
        static_cast<Bf16 const*>(rows), static_cast<Bf16*>(out), nullptr, scales, permuted_of_row,
        row_of_permuted, ids, first_offset, tokens, columns, columns, top_k, experts, ranks,
        all_to_all != 0, false, static_cast<cudaStream_t>(stream));
    return 1;
  });
}

}  // extern "C"
