"""Triage takes from a text what the text says: denials, possibilities, devices, words, releases, errors."""

import functools
import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.triage.triage import Finding, Grade, Triage, triage
from moedoctor.reporters.pages.triage import TriageDocument, triage_page
from moedoctor.reporters.table import to_text
from moedoctor.text import load_yaml
from tests.diagnose.triage.test_lines import messages


def read(text: str) -> Triage:
    return triage(io.BytesIO(text.encode()))


def find(text: str, id: str) -> Finding:
    result = read(text)
    return next(finding for finding in (*result.findings, *result.possible) if finding.id == id)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ('I could not reproduce "b_scales is not on GPU"', "MD003"),
        ("We can't reproduce RuntimeError: b_scales is not on GPU with --cpu-offload-gb 4", "MD003"),
        ("b_scales is not on GPU does not happen here. Offload with --cpu-offload-gb 4", "MD003"),
        ("There is no cudaErrorNoKernelImageForDevice on my RTX 5090 with an NVFP4 MoE.", "MD004"),
        ('my server does not show "Using KV cache scaling factor 1.0 for fp8_e4m3"', "MD012"),
        ("We never saw an illegal memory access with --cpu-offload-gb 8", "MD020"),
    ],
)
def test_a_failure_that_the_text_denies_is_a_near_miss(text: str, id: str) -> None:
    result = read(text)
    assert (result.findings, result.possible) == ((), ())
    reasons = {miss.id: miss.reason for miss in result.near_misses}
    assert reasons[id] == "the text does not say that it happened here"


@functools.cache
def list_lines() -> list[str]:
    """Return the entries' messages, and the first lines of texts, that are a finding alone; no frames."""
    texts = [text for _, text in messages()]
    texts += [row["text"].strip() for row in load_yaml("tests.diagnose.triage", "lines.yaml")]
    lines = {text.splitlines()[0].replace('"', "'") for text in texts if not text.startswith("File ")}
    return sorted(line for line in lines if read(line).findings)


LINES = st.deferred(lambda: st.sampled_from(list_lines()))
DENIED = (
    *('I could not reproduce "{}"', 'We do not see "{}" any more', 'I never got "{}".', 'No "{}" any more'),
    *('Unlike the reports of "{}", our server starts', 'This is not "{}".', 'It starts without "{}"'),
    *('"{}" is fixed since we upgraded', 'We fixed "{}"; now it hangs', 'Instead of "{}" it hangs'),
    *(
        'The message "{}" is gone',
        'This is different from "{}"',
        'Upgrading resolved the "{}"',
        '"{}" went away',
    ),
    *('Issue #12345 has "{}", ours hangs', 'Other people report "{}", we have none'),
    *('I tried to get "{}", but the server starts and never raises it', 'If it failed, one would see "{}"'),
    *('A colleague claims that "{}" comes from a setting', 'I read in #38718 that others see "{}"'),
    *('"{}" is history', 'I wonder whether "{}" can come', 'We grep for "{}" and found nothing'),
    *('With MARLIN "{}" never comes up here', 'The guide says that "{}" may be printed'),
)
TOLD = (
    *("A user will see:\n\n```\n{}\n```", '"{}" for you must be an old wheel', 'It prints "{}" if X is set'),
    *('Your log has "{}", so upgrade', '@x, who had "{}" in spring, runs 0.33.0 today'),
    *(
        'If you set X, you get "{}"',
        'When you combine these two, you get "{}"',
        'In case you see "{}", upgrade',
    ),
    *('We used to see "{}" until an upgrade', 'Previously "{}" came up, all is well', 'The old crash "{}"'),
    *(
        'People who see "{}" have an old wheel',
        'For reference: "{}" is what #37883 is about.',
        'Had we kept it, "{}"',
    ),
    *('Does 0.33.0 still have the "{}" bug?', 'I am afraid of "{}"', 'A test which checks for "{}" passes'),
    *('Our alert watches for the text "{}"', 'retry_on = ["{}"]', 'grep -c "{}" server.log', 'We avoid "{}"'),
    *("Somebody wrote:\n> {}\nOurs is slow.", "- [Bugfix] Fix {} (#37883)", 'test_it["{}"] PASSED'),
    *(
        "Feature request: better messages\n\n> {}\n",
        "Release notes\n\n{}\n",
        '"{}" with X is history since 0.30.0',
    ),
)
SAID = (
    *("What you see in my log:\n\n```\n{}\n```", 'Since the early export, the start ends with "{}"'),
    *("{}", 'I get "{}"', "It ends with {}", 'After an upgrade: "{}" and nothing helps'),
    *("The server does not start: {}", "I could not find out why: {}", 'It is not fixed: "{}"'),
    *('I tried to start it, but got "{}"', 'With this one "{}", but the other does not show it'),
    *(
        "Our log:\n> {}",
        'Does anyone know why I get "{}"?',
        "When I start it: {}",
        "Previously it worked, now: {}",
    ),
    *('"{}", and I never saw it before', 'Our users get "{}"', 'If I set it I get "{}"'),
)


@settings(max_examples=150, deadline=None)
@example("Unknown vLLM environment variable detected: VLLM_USE_FLASHINFER_MOE_FP4", "X:\n> {}\nSlow.", "{}")
@example("RuntimeError: b_scales is not on GPU", TOLD[0], SAID[0])
@example("RuntimeError: b_scales is not on GPU", TOLD[1], SAID[1])
@given(LINES, st.sampled_from((*DENIED, *TOLD)), st.sampled_from(SAID))
def test_a_line_counts_as_the_sentence_around_it_says(line: str, denial: str, statement: str) -> None:
    assert read(denial.format(line)).findings == ()
    result = read(statement.format(line))
    assert result.findings or result.possible


@pytest.mark.parametrize(
    "text",
    [
        "I cannot reproduce it every time: RuntimeError: b_scales is not on GPU",
        "I could not find out why b_scales is not on GPU",
        "There is no traceback but b_scales is not on GPU",
        "What you see in my log is RuntimeError: b_scales is not on GPU",
        "The server does not show anything else. b_scales is not on GPU",
    ],
)
def test_another_denial_in_the_text_denies_nothing(text: str) -> None:
    assert find(f"{text}\nvllm serve X --cpu-offload-gb 4", "MD003").grade is Grade.CERTAIN


@pytest.mark.parametrize("hedge", ["may cause", "could lead to", "can produce"])
def test_what_may_happen_did_not_happen(hedge: str) -> None:
    text = f"vllm serve X-NVFP4-MoE --cpu-offload-gb 4\nThis setting {hedge} incorrect outputs."
    assert read(text).findings == ()
    assert read(text.replace(hedge, "gives")).findings[0].id == "MD008"


def test_a_warning_tells_of_no_crash() -> None:
    traceback = "WARNING 11-23 02:19:23 [base.py:383] Traceback (most recent call last):"
    warning = "WARNING 11-23 02:19:18 [kv_cache.py:203] Using KV cache scaling factor 1.0 for fp8_e4m3."
    assert find(f"{traceback}\n{warning}", "MD012").grade is Grade.LIKELY
    assert find(f"{traceback.replace('WARNING', 'ERROR')}\n{warning}", "MD012").grade is Grade.POSSIBLE


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "ValueError: FP8 MoE backend 'DEEPGEMM' does not support the deployment configuration since "
            "kernel does not support current device cuda.",
            "remove the setting",
        ),
        ("RuntimeError: b_scales is not on GPU", ""),
    ],
)
def test_a_lone_line_is_likely_at_best_and_its_advice_rests_on_it(line: str, advice: str) -> None:
    (finding,) = read(line).findings
    assert finding.grade is Grade.LIKELY
    assert advice in finding.next_step
    assert not advice or "use the flag" not in finding.next_step


@pytest.mark.parametrize(
    "text",
    [
        "RTX 4090: RuntimeError: No supported CUDA architectures found for major versions [10, 12].",
        "RuntimeError: FlashInfer requires GPUs with sm75 or higher",
        "NVFP4 MoE: the trtllm kernel of FlashInfer is not supported on sm_120a, it requires sm_100a",
        "H100 with an NVFP4 MoE: no kernel image is available for execution on the device",
    ],
)
def test_a_refusal_by_device_is_no_build_failure(text: str) -> None:
    assert [finding.id for finding in read(text).findings] == []


SCALE_ONE = "WARNING [kv_cache.py:104] Using KV cache scaling factor 1.0 for fp8_e4m3."


def test_who_has_kv_scales_is_not_told_to_add_them() -> None:
    finding = find(f"{SCALE_ONE} My checkpoint has k_scale and v_scale. The output is garbage.", "MD012")
    assert finding.grade is not Grade.CERTAIN
    assert "or a checkpoint with KV scales" not in finding.next_step
    assert (
        find(f"{SCALE_ONE} The checkpoint ships no k_scale and no v_scale.", "MD012").grade is Grade.CERTAIN
    )


@pytest.mark.parametrize("words", ["works", "does nothing", "environment variable", "fused"])
def test_words_are_not_backends(words: str) -> None:
    assert read(f"MoE: --moe-backend {words}, moe_backend {words}").backends == ()
    assert read(f"{words}: vllm serve X --moe-backend marlin").backends == ("MARLIN",)
    assert read("Using 'FlashInfer TRTLLM' Unquantized MoE backend").backends == ("FLASHINFER_TRTLLM",)


def show(text: str) -> str:
    return " ".join(
        to_text(triage_page(TriageDocument.from_results([("stdin", read(text))])), width=120).split()
    )


def test_another_release_than_the_one_that_failed_is_named_as_such() -> None:
    assert "names vLLM 0.19.1, but not as the release that failed" in show("It works in vLLM 0.19.1")
    assert "names vLLM 0.19.1, but not as the release that failed" in show("Answers are right in 0.19.1")
    for text in ("Since upgrading to 0.24.0 it fails", "It fails. 0.24.0, RTX 5090"):
        assert "the text names vLLM 0.24.0;" in show(text)
    assert "the text names no release" in show("It fails with torchvision 0.26.0")


def test_an_error_in_a_sentence_is_of_its_own_class() -> None:
    claim = 'A colleague claims that "no kernel image is available for execution on the device" comes'
    error = read(f"{claim} from a suffix. What we have is: torch.OutOfMemoryError: CUDA out of memory.").error
    assert error is not None
    assert error.kind == "memory"


def test_what_the_text_has_is_not_asked_for_again() -> None:
    error = "RuntimeError: Unknown recipe"
    for facts, words in {
        "vLLM API server version 0.33.0": "the release",
        "vllm serve m --moe-backend marlin": "the whole command line",
        "an H200": "the GPU",
        f'File "vllm/x.py", line 1, in f\n{error}': "the 30 lines before",
    }.items():
        assert words in show(f"vLLM MoE\n{error}").partition("paste more: ")[2]
        assert words not in show(f"{facts}\n{error}").partition("paste more: ")[2]
    texts = ("INFO the server is ready", "the tool call could not be parsed")
    assert [show(text).partition("more: ")[2][:23] for text in texts] == ["", "the whole command line."]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("KeyError: 'layers.0.mlp.experts.w2_weight'", "MD021"),
        ("AttributeError: 'Qwen3MoeMLP' object has no attribute 'w2_weight'", ""),
        (
            "AttributeError: Layer x.experts has no parameter 'w2_weightection' for checkpoint weight 'x'",
            "MD021",
        ),
        (
            "AssertionError: Tried to load weights of size torch.Size([16, 512])to a parameter of [8, 512]",
            "",
        ),
        ("RuntimeError: The size of tensor a (192) must match the size of tensor b (256) at dimension 0", ""),
        ("ValueError: input size 192 is not divisible by weight quantization block_n = 128.", "MD022"),
        ("ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}", ""),
        ("ValueError: There is no module or parameter named 'gate' in Qwen3MoeForCausalLM", ""),
    ],
)
def test_a_loading_error_leads_to_preflight_whether_or_not_it_is_known(line: str, id: str) -> None:
    result = read(f"INFO Loading weights\n{line}\nINFO the engine ends")
    assert [finding.id for finding in result.findings] == ([id] if id else [])
    assert all(finding.grade is Grade.LIKELY for finding in result.findings)
    assert result.possible == ()
    assert result.error is not None
    assert result.error.next_step
    assert result.error.excerpt == line
    assert "`moedoctor preflight" in show(line)
    assert ("No known failure" in show(line)) is (id == "")


def test_an_error_that_no_entry_explains_is_shown() -> None:
    error = read("INFO fine\nValueError: Unknown quantization method: xyz\nINFO bye").error
    assert error is not None
    assert (error.line, error.kind) == (2, "quantization")
    assert read("INFO fine").error is None


def test_not_it_is_said_only_of_what_a_reader_might_think_of() -> None:
    crash = "FP8 MoE on an H100, vLLM 0.33.0\nCUDA error: an illegal memory access was encountered"
    assert read(crash).near_misses == ()
    report = "MoE, vLLM 0.33.0: on NaN the router picks the same expert K times"
    assert [miss.id for miss in read(report).near_misses] == ["MD001"]


def test_a_fix_of_one_conversion_is_not_claimed_for_another() -> None:
    memory = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB. MoE on MARLIN, vLLM 0.24.0\n"
    )
    frames = {"awq": "in gptq_marlin_moe_repack", "bf16": "in convert_moe_weights_to_flashinfer_layout"}
    for frame in frames.values():
        text = f'{memory}File "/x/vllm/model_executor/layers/y.py", line 3, {frame}'
        assert "not for this conversion" in find(text, "MD026").releases
    fp4 = f'{memory}NVFP4\nFile "/x/vllm/model_executor/layers/y.py", line 3, in repack_weight'
    assert "0.26.0" in find(fp4, "MD026").releases
    assert "not for this" not in find(fp4, "MD026").releases


def test_a_refusal_by_every_backend_is_a_failed_setting_only_if_one_was_set() -> None:
    line = "NotImplementedError: No NvFp4 MoE backend supports the deployment configuration."
    assert find(line, "MD010").grade is Grade.POSSIBLE
    assert find(f"vllm serve m --moe-backend marlin\n{line}", "MD010").grade is Grade.LIKELY


def test_what_follows_from_the_error_of_a_finding_is_told_with_it() -> None:
    text = (
        "vLLM 0.20.0\nvllm serve: error: argument --moe-backend: invalid choice: 'b12x' (choose from 'auto')"
    )
    assert "vLLM 0.29.0 is the first that has --moe-backend b12x" in find(text, "MD010").next_step
    assert "0.29.0" not in find(f"{text}\n\nVLLM_NVFP4_MOE_BACKEND=1", "MD010").next_step.partition("\n")[0]


def test_tokens_that_are_counted_are_shown_and_tokens_that_open_a_door_are_not() -> None:
    flags = "--max-num-batched-tokens 4096 --tokenizer-mode slow --api-tokens q9w8e7r6 --auth-tokens=zxcvbn12"
    answer = show(
        f"VLLM_AUTH_TOKENS=q1w2e3r4 VLLM_TOKENIZER_AUTH=q5w6e7r8 vllm serve m {flags}\nRuntimeError: x"
    )
    assert "--max-num-batched-tokens 4096, --tokenizer-mode slow" in answer
    assert not any(secret in answer for secret in ("q9w8e7r6", "zxcvbn12", "q1w2e3r4", "q5w6e7r8"))
