"""The releases that a text names, and the failures that they exclude."""

import pytest

from moedoctor.diagnose.triage.advice import Advice
from moedoctor.diagnose.triage.facts_in_text import Facts, parse, release_words
from moedoctor.diagnose.triage.settings_in_text import Settings
from moedoctor.diagnose.triage.signatures import Signature
from moedoctor.entries import load_entries
from moedoctor.fixes.backends.release_tables import SCHEMES, load_tables

VLLM = {
    "vllm api server version 0.18.0": (0, 18, 0, 0),
    "initializing a v1 llm engine (v0.19.1) with config: model='x'": (0, 19, 1, 0),
    "vllm==0.5.3": (0, 5, 3, 0),
    "| vllm | 0.17.1 |": (0, 17, 1, 0),
    "image: vllm/vllm-openai:v0.25.1": (0, 25, 1, 0),
    "vllm: 0.18.2rc1.dev25+gef53395e2 (built from main)": (0, 18, 2, -1),
    "docker run --privileged vllm/vllm-openai-rocm:v0.21.0": (0, 21, 0, 0),
    "image: vllm/vllm-openai:nightly-d05da62e (0.29.1rc1.dev422)": (0, 29, 1, -1),
    "vllm 0.26": (0, 26, 0, 0),
    "reproduced with vllm v0.8.3.dev172+g2b93162f": (0, 8, 3, -1),
    "▀▄▀ █  version 0.20.2rc1.dev562+g1c78f76c2.d20260521": (0, 20, 2, -1),
    "after the upgrade to 0.33.0 it stops": (0, 33, 0, 0),
    "works on 0.32.0, broken on 0.33.0": (0, 33, 0, 0),
    "updated vllm from 0.27.1 to 0.33.0, and now": (0, 33, 0, 0),
    "upgrade to 0.34.0 did not help": (0, 34, 0, 0),
    "repetition loops on v0.14.0rc1.dev308": (0, 14, 0, -1),
    "tried the older and 0.33.1 as well": (0, 33, 1, 0),
    # Other numbers are not the release at fault.
    "it will be removed in vllm v0.24.0": None,
    "CUDA graph memory profiling is enabled (default since v0.21.0)": None,
    "| the crash | fixed in vllm 0.20.0": None,
    "upgrading to vllm 0.20.0 helped": None,
    "vllm 0.1.dev20073+g8e685d198": None,
    "torch 2.11.0 and vllm": None,
    "vllm on 127.0.0.1:8000": None,
    "vllm#39593": None,
}
FLASHINFER = ("[pip3] flashinfer-python==0.6.6", "flashinfer                   : 0.6.6", "flashinfer 0.6.6")


@pytest.mark.parametrize("line", VLLM)
def test_the_vllm_releases_in_a_line(line: str) -> None:
    assert about(line).vllm == ({VLLM[line]} if VLLM[line] else set())


@pytest.mark.parametrize("line", FLASHINFER)
def test_the_flashinfer_releases_in_a_line(line: str) -> None:
    assert about(line).flashinfer == {(0, 6, 6, 0)}


def test_other_numbers_are_not_releases() -> None:
    assert parse("7") is None
    assert parse("25.11") is None  # the year of a container
    assert parse("0.1.dev1") is None
    assert parse("0.6.8.post1") == (0, 6, 8, 0)


def about(*lines: str) -> Facts:
    facts = Facts()
    for line in lines:
        facts.read(line)
    return facts


@pytest.mark.parametrize(
    ("lines", "releases", "allowed"),
    [
        (["vllm 0.20.0"], {"fixed": "0.20.0"}, False),
        (["vllm 0.19.1"], {"fixed": "0.20.0"}, True),
        (["vllm 0.20.0rc1.dev3"], {"fixed": "0.20.0"}, True),
        (["vllm 0.19.1", "vllm 0.21.0"], {"fixed": "0.20.0"}, True),
        ([], {"fixed": "0.20.0"}, True),
        (["vllm 0.5.3"], {"since": "0.17.1"}, False),
        (["vllm 0.17.1"], {"since": "0.17.1"}, True),
        ([], {"since": "0.24.0", "needs_version": True}, False),
        (["vllm 0.24.0"], {"since": "0.24.0", "needs_version": True}, True),
        (["flashinfer 0.6.8"], {"flashinfer_fixed": "0.6.8"}, False),
        (["flashinfer 0.6.6"], {"flashinfer_fixed": "0.6.8"}, True),
    ],
)
def test_releases_rule_a_signature_in_or_out(lines, releases, allowed):
    reason = about(*lines).explain_exclusion(Signature("MD001", ("moe",), 0.8, **releases))
    assert (not reason) is allowed


def test_the_summary_names_both() -> None:
    assert about("vllm 0.18.2rc1", "flashinfer 0.6.6").summarize() == "vLLM 0.18.2-dev · FlashInfer 0.6.6"
    assert about().summarize() == ""


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("rtx blackwell (sm12.0), only sm9.0 and sm10.x are checked", ["SM 12.0", "SM 9.0"]),
        ("on 4 * 2080ti 22g, not on 2080 tiles", ["2080TI"]),
        (
            "on a 5090 and 2x 3090, 8xb200; 8*a100(40gb), on 4090 tokens, port 5080",
            ["RTX 5090", "RTX 3090", "B200", "A100"],
        ),
        ("sm_86 and sm 12.1 and compute capability 8.9.", ["SM 8.6", "SM 12.1", "SM 8.9"]),
    ],
)
def test_a_capability_with_a_dot_is_read_whole(line: str, gpus: list[str]) -> None:
    facts = Facts()
    facts.read(line)
    assert sorted(facts.gpus) == sorted(gpus)


def test_classes_of_experts_name_a_backend_that_the_tables_give_them() -> None:
    for scheme in SCHEMES:
        kernels = load_tables(scheme, "0.33.0").kernels
        for name in {row.name for row in kernels}:
            backends = about(f"using {name.lower()}").list_backends()
            given = {row.backend.upper().replace(" ", "_") for row in kernels if row.name == name}
            assert not backends or any(each.startswith(backends) for each in given), (name, backends)


def test_the_command_of_a_next_step_asks_for_what_the_text_names() -> None:
    facts = Facts()
    step = "run `moedoctor backends` there"
    assert Advice(facts).fit(step) == step
    facts.read("vllm 0.33.0 on sm_120, before that vllm 0.15.0")
    assert Advice(facts).fit(step) == "run `moedoctor backends --sm 12.0 --release 0.33.0` there"


def test_a_command_runs_nothing_that_a_text_put_into_a_value() -> None:
    flags = {"dtype": "a;reboot", "quantization": "$(reboot)", "cpu-offload-params": "…"}
    settings = Settings(flags, model="a/b")
    fitted = Advice(Facts(), settings).fit("`vllm serve ...`")
    assert fitted == "`vllm serve a/b --dtype 'a;reboot' --quantization '$(reboot)'`"


def test_a_release_before_the_oldest_is_not_called_unaffected() -> None:
    facts = Facts()
    facts.read("vllm 0.15.0")
    assert release_words(load_entries()["MD010"], facts).startswith(
        "vLLM 0.15.0 is older than what was looked at"
    )
