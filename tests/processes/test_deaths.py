"""Crashes are classified by CUDA's messages and exit statuses; secrets in stderr are masked."""

import pytest

from moedoctor.processes import deaths
from moedoctor.results import Death


@pytest.mark.parametrize(
    ("text", "death"),
    [
        ("CUDA error: an illegal memory access was encountered", Death.ILLEGAL_MEMORY_ACCESS),
        ("Triton Error [CUDA]: an illegal memory access was encountered", Death.ILLEGAL_MEMORY_ACCESS),
        ("cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS", Death.ILLEGAL_MEMORY_ACCESS),
        ("CUDA error: misaligned address", Death.ILLEGAL_MEMORY_ACCESS),
        ("CUDA error: an illegal instruction was encountered", Death.ILLEGAL_INSTRUCTION),
        ("CUDA error: device-side assert triggered", Death.DEVICE_ASSERT),
        ("CUDA error: no kernel image is available for execution on the device", Death.NO_KERNEL_IMAGE),
        ("CUDA driver error: CUDA_ERROR_NO_BINARY_FOR_GPU", Death.NO_KERNEL_IMAGE),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", Death.OUT_OF_MEMORY),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", Death.CUDA_ERROR),
        ("CUDA error: unspecified launch failure", Death.CUDA_ERROR),
        ("RuntimeError: b_scales is not on GPU", None),
        ("Illegal instruction in the text of a model's answer", None),
    ],
)
def test_text_of_cuda_is_classified(text: str, death: Death | None) -> None:
    assert deaths.classify(text) is death


def test_stderr_is_more_specific_than_the_signal() -> None:
    assert deaths.from_exit(-63, "").message == "killed by signal 63"
    assert "memory runs out" in deaths.from_exit(-9, "").message
    ended = deaths.from_exit(-6, "noise\nCUDA error: device-side assert triggered\nmore noise\n")
    assert (ended.death, ended.message) == (Death.DEVICE_ASSERT, "CUDA error: device-side assert triggered")


def test_tail_is_short_indented_and_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    text = "".join(f"line {number}\n" for number in range(100))
    frame = "  File /home/somebody/x.py token hf_abcdefghijklmnopqrstuv"
    tail = deaths.last_lines(f"{text}{frame}\n{'x' * 5000}\n")
    assert len(tail) == deaths.TAIL_LINES
    assert tail[-2].startswith("  File ~/x.py")
    assert "hf_" not in tail[-2]
    assert len(tail[-1]) == 300
