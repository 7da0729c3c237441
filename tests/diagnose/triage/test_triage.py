"""Findings in realistic texts: wrapped, prefixed, quoted, encoded, large and hostile."""

import io
import random
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.triage import triage as triage_module
from moedoctor.diagnose.triage.triage import Grade, Triage, triage
from moedoctor.redaction import Redactor
from tests.diagnose.triage.threads_of_tests import threads

THREADS = tuple(threads())
POSITIVE = tuple(thread for thread in THREADS if thread.ids)
CRASH = "RuntimeError: b_scales is not on GPU in fused_marlin_moe, --cpu-offload-gb 4"


def read(text: str | bytes, redactor: Redactor | None = None) -> Triage:
    return triage(io.BytesIO(text.encode() if isinstance(text, str) else text), redactor)


def ids(text: str | bytes) -> set[str]:
    return {finding.id for finding in read(text).findings}


def test_the_line_and_the_excerpt() -> None:
    finding = read(f"first\nsecond\n{CRASH}\nfourth").findings[0]
    assert (finding.id, finding.line, finding.excerpt) == ("MD003", 3, CRASH)
    assert "--cpu-offload-params" in finding.next_step


def test_the_excerpt_is_short_and_holds_the_message() -> None:
    excerpt = read("x " * 400 + CRASH + " y" * 400).findings[0].excerpt
    assert "b_scales is not on GPU" in excerpt
    assert len(excerpt) <= 170


def test_the_excerpt_is_masked() -> None:
    text = (
        "RuntimeError: b_scales is not on GPU at /home/alice/vllm --api-key=s3cret123 alice@example.org\x07 "
        "http://10.1.2.3:8000/x C:\\Users\\bob\\log hf_abcdefghijklmnop1234 gpu-box"
    )
    excerpt = (
        read(text + " --cpu-offload-gb 4 marlin", Redactor(home="/data/carol", user="carol", host="gpu-box"))
        .findings[0]
        .excerpt
    )
    for secret in ("alice", "s3cret", "example.org", "10.1.2.3", "bob", "abcdefgh", "gpu-box", "\x07"):
        assert secret not in excerpt
    assert "b_scales is not on GPU" in excerpt


def test_the_best_comes_first() -> None:
    findings = read("\n\n".join(thread.text for thread in POSITIVE)).findings
    assert len(findings) >= 15
    assert [finding.confidence for finding in findings] == sorted(
        (finding.confidence for finding in findings), reverse=True
    )
    assert len({finding.id for finding in findings}) == len(findings)
    assert all(0.5 < finding.confidence <= 1 for finding in findings)


@pytest.mark.parametrize(("distance", "found"), [(5, {"MD008"}), (60, set())])
def test_clues_are_combined_only_if_they_are_near_each_other(distance: int, found: set[str]) -> None:
    flag, symptom = "vllm serve X-NVFP4 --cpu-offload-gb 8", "The output is garbage."
    between = "\n" * distance
    assert ids(flag + between + symptom) == found
    assert ids(symptom + between + flag) == found


TRITON = "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)\n"


@pytest.mark.parametrize(
    ("context", "grade"),
    [
        ("", Grade.POSSIBLE),
        ("vllm serve Qwen/Qwen3-30B-A3B-FP8 --cpu-offload-gb 8", Grade.LIKELY),
        ("vllm serve mistral-7b --cpu-offload-gb 8 --enable-lora", Grade.POSSIBLE),
        ("ComfyUI with SageAttention", Grade.POSSIBLE),
    ],
)
def test_context_raises_and_lowers_the_grade(context: str, grade: Grade) -> None:
    result = read(f"{TRITON}{context}")
    shown = {finding.id: finding for finding in (*result.findings, *result.possible)}
    assert shown["MD003"].grade is grade
    assert ("--cpu-offload-gb" in context) == any("host" in reason for reason in shown["MD003"].why)
    assert any("host" in clause for clause in shown["MD003"].missing) == ("--cpu-offload-gb" not in context)


def test_a_text_that_lacks_a_context_is_possible_at_best() -> None:
    choice = "There is no way to choose the backend"
    whole = read(f"{choice} of the MoE layers in vLLM").findings[0]
    part, bare = read(f"{choice} in vLLM").possible[0], read(choice).possible[0]
    assert {finding.id for finding in (whole, part, bare)} == {"MD010"}
    assert whole.confidence > part.confidence > bare.confidence
    assert part.missing == ("the model has experts",)
    assert bare.missing == ("the model has experts", "the program is vLLM")


def test_the_prefix_of_a_log_is_evidence() -> None:
    prefixed = read(f"(EngineCore_DP0 pid=9) ERROR 11-22 10:00:00 [core.py:866] {TRITON}").possible[0]
    assert prefixed.confidence > read(TRITON).possible[0].confidence
    assert "a logger of vLLM wrote it" in prefixed.why


def test_the_gpu_and_the_backend_are_read_off_the_text() -> None:
    result = read(
        "vLLM 0.33.0 on an NVIDIA GeForce RTX 5090 (sm_120)\n"
        "Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: ['MARLIN']."
    )
    assert (result.releases, result.gpus, result.backends) == (
        "vLLM 0.33.0",
        ("GEFORCE RTX 5090", "SM 12.0"),
        ("FLASHINFER_CUTLASS",),
    )


def test_a_secret_in_place_of_a_backend_is_left_out() -> None:
    assert read("vllm serve X --moe-backend hf_abcdefghijklmnop1234").backends == ()


CRASH_OF_0_19 = (
    "vLLM Version : {}\nFlashInfer CUTLASS MoE backend, BF16 Qwen3-30B-A3B with CUDA graphs:\n"
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
)


@pytest.mark.parametrize(("release", "found"), [("0.19.1", {"MD001"}), ("0.20.0", set()), ("0.33.0", set())])
def test_releases_rule_a_crash_in_or_out(release: str, found: set[str]) -> None:
    assert ids(CRASH_OF_0_19.format(release)) == found


@pytest.mark.parametrize(
    ("flag", "found"), [("--cpu-offload-gb 8", {"MD008"}), ("--cpu-offload-gb 0", set()), ("", set())]
)
def test_settings_rule_garbage_in_or_out(flag: str, found: set[str]) -> None:
    assert ids(f"vllm serve nvidia/Nemotron-3-Nano-30B-A3B-NVFP4 {flag}\nThe output is garbage.") == found


@pytest.mark.parametrize(
    "dump",
    [
        "Namespace(model='Qwen3-30B-A3B', cpu_offload_gb=0, quantization='fp8')",
        "config: {'cpu_offload_gb': 0.0, 'cpu_offload_params': set(), 'model': 'Qwen3-30B-A3B'}",
        "OffloadConfig(offload_backend='auto', uva=UVAOffloadConfig(cpu_offload_gb=0, cpu_offload_params={})",
    ],
)
def test_a_dump_of_defaults_is_no_offload(dump: str) -> None:
    assert ids(f"vLLM\n{dump}\nThe output of this FP8 model is garbage.") == set()


def test_a_text_about_another_engine_is_no_finding() -> None:
    text = "The output is garbage with cpu offload of the MoE experts in NVFP4, --cpu-offload-gb 4"
    assert ids(text) == {"MD008"}
    assert ids(f"{text}\nllama-server, ggml") == set()


def test_a_report_in_the_middle_of_a_large_log() -> None:
    noise = "\n".join(
        f"INFO 04-22 12:00:{index % 60:02d} [loggers.py:259] Engine 000: Avg throughput: {index}.5 tokens/s"
        for index in range(10_000)
    )
    report = next(thread for thread in POSITIVE if thread.source.startswith("the same as a log"))
    found = read(f"{noise}\n{report.text}\n{noise}").findings
    assert [finding.id for finding in found] == ["MD002", "MD020"]
    assert 10_000 < found[0].line < 10_010


def talkative_log(size: int) -> bytes:
    """Return lines about experts that all differ in shape."""
    pick = random.Random(1)
    lines, length = [], 0
    while length < size:
        word = "".join(pick.choices("ghjkpqtuvyz", k=12))
        lines.append(
            f"INFO [fused_moe.py:{length % 900}] expert {word[:4]} of the MoE layer {word[4:9]} {word[9:]}"
        )
        length += len(lines[-1]) + 1
    return "\n".join(lines).encode()


@pytest.mark.slow
@pytest.mark.alone
def test_a_log_of_new_lines_about_experts_costs_little_more_than_a_search_for_the_words() -> None:
    """The speed is compared with a plain search for the same words (about 120 MB/s)."""
    data = talkative_log(12_000_000)
    words = "|".join(triage_module.load_data("anchors.yaml").values()).split("|")

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    def search() -> None:
        lowered = data.lower()
        for word in words:
            lowered.count(word.encode())

    read("warm up the patterns of moe, offload and flashinfer")
    ratio = min(seconds(lambda: read(data)) / seconds(search) for _ in range(3))
    assert ratio < 3, f"{ratio:.1f} times a search for the words"


def test_a_crash_in_a_log_that_talks_about_experts_is_found() -> None:
    report = f"{CRASH}\nINFO 04-22 other things\n".encode()
    noise = talkative_log(1_000_000)
    found = read(noise + b"\n" + report + noise).findings
    assert [(finding.id, finding.line) for finding in found] == [("MD003", noise.count(b"\n") + 2)]


PROBES = (
    "moe ", "nan router ", "[w1, w3] [gate, up] ", "cpu offload weights experts ", "expert ids -1 index ",
    "!", "(pid=", "> ", '{"log":"', "&amp;gt;", "\x1b[", "<a ", "\\n", "vllm version 0.",
    "VLLM_USE_FLASHINFER_MOE_FP4=", "Apr 22 10:00:00 a ", "accuracy: a a a ", "((((",
)  # fmt: skip


def one_line(probe: str, size: int) -> bytes:
    return (probe * (size // len(probe) + 1)).encode()[:size]


def lines_of(probe: str, size: int) -> bytes:
    """Return a line of another shape for each 300 bytes of `size`."""
    letters = "ghijklmnopqrstuvwxyz"
    ends = (letters[n % 20] + letters[n // 20 % 20] + letters[n // 400] for n in range(size // 300))
    return "\n".join(f"{probe * 5} {' '.join(end)}" for end in ends).encode()


@pytest.mark.parametrize(
    ("text", "probe"),
    [*((one_line, probe) for probe in PROBES), *((lines_of, probe) for probe in PROBES[:3])],
)
def test_time_is_linear(text: Callable[[str, int], bytes], probe: str) -> None:
    def seconds(size: int) -> float:
        data = text(probe, size)
        started = time.process_time()
        read(data)
        return time.process_time() - started

    seconds(5_000)
    # Quadratic time would take 16 times as long. Garbage collection may slow one run, hardly two.
    assert any(seconds(160_000) < 6 * seconds(40_000) + 0.04 for _ in range(2))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=3_000))
def test_random_bytes_never_raise(data: bytes) -> None:
    read(data)


WORDS = sorted({word for thread in POSITIVE for word in re.findall(r"\S+", thread.text)})


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "\n", "\x00", "\x1b[31m", "\ud800", "> ", "{"]), max_size=120))
def test_mixed_words_never_raise(words: list[str]) -> None:
    for finding in read(" ".join(words).encode("utf-8", "surrogatepass")).findings:
        assert finding.line >= 1
        assert finding.excerpt.isprintable()


def test_no_more_is_kept_of_a_clue_than_needed() -> None:
    notes = triage_module._Notes()
    for line in range(10_000):
        notes.add(line, "x")
    assert len(notes.list_lines()) == 2_500
    assert len(notes.excerpts) == 40


def test_what_a_finding_needs_is_among_its_reasons() -> None:
    text = "The V2 model runner of vLLM 0.25.1 takes --cpu-offload-gb 8, and nothing is offloaded."
    (finding,) = read(text).findings
    assert finding.id == "MD013"
    assert {"weights are on the host (--cpu-offload-gb)", "the V2 model runner is used"} <= set(finding.why)
