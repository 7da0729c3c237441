"""The target for a GPU and toolkit, and the list variables, compared with FlashInfer and torch."""

import os
import re
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moedoctor.diagnose.cuda.instructions import list_needed, takes
from moedoctor.fixes import arch
from moedoctor.fixes.arch import targets as sm
from moedoctor.fixes.arch.flashinfer import (
    find_generation,
    list_generations,
    predict_moe_targets,
    predict_targets,
)

CUDAS = [(12, minor) for minor in range(10)] + [(13, minor) for minor in range(6)]


TARGETS = """
7.5 12.0 75,   8.0 12.0 80,   8.6 12.4 86,   8.7 12.8 87,   8.8 13.0 88,   8.9 13.0 89,   9.0 12.0 90a,
9.0 13.2 90a,  10.0 12.8 100a, 10.0 13.0 100a, 10.1 12.9 101a, 10.3 12.9 103a, 10.7 13.0 100f, 10.7 13.5 107a,
11.0 13.0 110a, 12.0 12.8 120a, 12.0 12.9 120f, 12.0 13.0 120f, 12.1 12.9 121a, 12.1 13.0 121a
"""
"""Capability, CUDA release and target."""


@pytest.mark.parametrize(("capability", "cuda", "target"), [case.split() for case in TARGETS.split(",")])
def test_target_of_each_gpu(capability: str, cuda: str, target: str) -> None:
    decision = arch.resolve_arch(capability, cuda)
    assert decision.target == target
    assert decision == arch.resolve_arch(sm.parse_capability(capability), (*sm.parse_cuda(cuda), 88))
    assert len(decision.reason) > 20
    assert decision.gencode == f"-gencode=arch=compute_{target},code=sm_{target}"
    assert decision.list_entry == sm.Target.parse(target).dotted


@pytest.mark.parametrize(
    ("capability", "cuda", "words"),
    [
        ((12, 0), (12, 6), ["12.6", "sm_120a needs CUDA 12.8", "sm_120f 12.9"]),
        ((12, 1), (12, 8), ["12.8", "sm_121a needs CUDA 12.9"]),
        ((11, 0), (12, 9), ["sm_110a needs CUDA 13.0"]),
        ((10, 1), (13, 0), ["sm_101a went after CUDA 12.9", "11.0"]),
        ((12, 2), (13, 0), ["capability", "12.2", "12.1"]),
        ((7, 0), (12, 0), ["capability", "7.0", "7.5"]),
        ((9, 0), (11, 8), ["cuda", "11.8", "12.0 to 13.x"]),
        ((9, 0), (14, 0), ["cuda", "14.0", "12.0 to 13.x"]),
        ("120", (13, 0), ["capability", "'120'"]),
        ("12.0f", (13, 0), ["capability", "'12.0f'"]),
        ((12, True), (13, 0), ["capability"]),
        ((12, 0), "13", ["cuda", "'13'"]),
    ],
)
def test_refused_gpus_and_toolkits(capability: object, cuda: object, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as refused:
        arch.resolve_arch(capability, cuda)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    assert [word for word in words if word not in str(refused.value)] == []


@given(capability=st.sampled_from(sm.list_capabilities()), cuda=st.sampled_from(CUDAS))
def test_a_target_compiles_loads_and_has_the_instructions_or_there_is_none(capability, cuda):
    def does(target: sm.Target) -> bool:
        usable = sm.is_known_target(target, cuda) and sm.loads_sass(target, capability)
        known = (each for each in list_needed(capability) if each.since <= cuda)
        return usable and all(takes(target, each, cuda) for each in known)

    try:
        target = sm.Target.parse(arch.resolve_arch(capability, cuda).target)
    except ValueError:
        # Code without suffix for an older GPU of the same major version may remain, before 9.0 alone.
        others = [each for each in sm.list_targets(cuda) if does(each) and each.capability == capability]
        assert others == []
    else:
        assert does(target)


def test_targets_have_one_name() -> None:
    for text in ("120f", "12.0f", "sm_120f", "compute_120f", "sm120f"):
        assert (str(sm.Target.parse(text)), sm.Target.parse(text).dotted) == ("120f", "12.0f")
    refused = "| 120|120\n|f|9|12.0g|12.0ff|1234|12.0+PTX|sm_|lto_120|05"
    for text in refused.split("|"):
        with pytest.raises(ValueError, match="is not a CUDA target"):
            sm.Target.parse(text)


@pytest.mark.parametrize(
    ("target", "runs", "does_not"),
    [
        ("80", "8.0 8.6 8.9", "7.5 9.0 12.0"),
        ("86", "8.6 8.9", "8.0 9.0"),
        ("90a", "9.0", "10.0 12.0"),
        ("100", "10.0 10.3 10.7", "11.0 12.0 9.0"),
        ("100f", "10.0 10.3 10.7", "10.1 11.0 12.0"),
        ("120a", "12.0", "12.1"),
        ("120f", "12.0 12.1", "10.0 11.0"),
        ("121f", "12.1", "12.0"),
    ],
)
def test_where_machine_code_runs(target: str, runs: str, does_not: str) -> None:
    code = sm.Target.parse(target)
    assert [gpu for gpu in runs.split() if not sm.loads_sass(code, sm.parse_capability(gpu))] == []
    assert [gpu for gpu in does_not.split() if sm.loads_sass(code, sm.parse_capability(gpu))] == []


@pytest.mark.parametrize(
    ("target", "gpu", "compiles"),
    [
        *(("80", "12.1", True), ("90", "9.0", True), ("90", "8.9", False)),
        *(("90a", "10.0", False), ("120f", "12.1", True), ("100f", "12.0", False)),
    ],
)
def test_where_ptx_compiles(target: str, gpu: str, compiles: bool) -> None:
    assert sm.compiles_ptx(sm.Target.parse(target), sm.parse_capability(gpu)) is compiles


@pytest.mark.parametrize(
    ("target", "first", "last"),
    [
        *(("120f", (12, 9), None), ("120a", (12, 8), None), ("110f", (13, 0), None)),
        *(("90f", None, None), ("89a", None, None), ("101", (12, 8), (12, 9)), ("70", (12, 0), (12, 9))),
    ],
)
def test_which_toolkits_know_a_target(target: str, first: tuple | None, last: tuple | None) -> None:
    code = sm.Target.parse(target)
    assert sm.find_first_cuda(code) == first
    known = [cuda for cuda in CUDAS if sm.is_known_target(code, cuda)]
    assert (known[0], known[-1]) == (first, last or CUDAS[-1]) if first else not known


# What each release resolves to: (setting, CUDA) -> target, None for an error. From the table of the releases.
OLD, FIRST_F, OWN_121, AGAIN_128 = "0.6.6", "0.6.7", "0.6.13", "0.7.2.post1"


@pytest.mark.parametrize(
    ("release", "capability", "arch_list", "cuda", "target"),
    [
        *((OLD, (12, 0), "12.0", cuda, "120") for cuda in ((12, 6), (12, 8), (12, 9), (13, 0))),
        *((OLD, (12, 0), None, cuda, "120a") for cuda in ((12, 6), (12, 8), (12, 9), (13, 0))),
        ("0.5.0", (12, 0), "12.0", (13, 0), "120"),
        (OLD, (9, 0), "9.0", (13, 0), "90"),
        (OLD, (8, 9), None, (13, 0), "89"),
        (FIRST_F, (12, 0), "12.0", (12, 9), "120f"),
        (FIRST_F, (12, 0), "12.0", (12, 8), None),
        (FIRST_F, (9, 0), "9.0", (12, 4), "90a"),
        ("0.6.8", (12, 1), "12.1", (13, 0), "121a"),
        (OWN_121, (12, 1), None, (12, 8), None),
        ("0.7.0.post1", (12, 0), None, (12, 8), None),
        ("0.7.1", (12, 0), None, (12, 8), "120a"),
        (AGAIN_128, (12, 0), "12.0", (12, 8), "120a"),
        (AGAIN_128, (12, 0), "12.0", (12, 9), "120f"),
        (AGAIN_128, (12, 1), None, (12, 8), None),
        *((release, (12, 0), "12.0f", (12, 6), "120f") for release in (OLD, FIRST_F, OWN_121, AGAIN_128)),
        *((release, (12, 0), "12.0a", (13, 0), "120a") for release in (OLD, FIRST_F, OWN_121, AGAIN_128)),
        *(
            (rules.first, (12, 0), text, (13, 0), None)
            for rules in list_generations()
            for text in ("12.0,12.1", "12.0 ", "120f", "")
        ),
    ],
)
def test_the_targets_of_a_release(release, capability, arch_list, cuda, target):
    reading = predict_targets(release, capability=capability, cuda=cuda, arch_list=arch_list)
    assert reading.targets == (() if target is None else (target,))
    assert (reading.error is None) == (target is not None)


def test_every_release_belongs_to_one_generation() -> None:
    assert [find_generation(rules.first) for rules in list_generations()] == list(list_generations())
    assert [find_generation(rules.last) for rules in list_generations()] == list(list_generations())
    assert find_generation("0.9.0") is list_generations()[3]
    with pytest.raises(ValueError, match=r"older than .* 0\.5\.0 to 0\.7\.2\.post1"):
        find_generation("0.4.1")


def test_the_moe_module_takes_the_targets_of_its_own_majors() -> None:
    def moe(capability: tuple[int, int], text: str) -> tuple[str, ...]:
        return predict_moe_targets("0.6.6", capability=capability, cuda=(13, 0), arch_list=text).targets

    assert moe((12, 0), "9.0a 10.0a 12.0f 12.1a") == ("120f", "121a")
    assert moe((10, 0), "9.0a 10.0a 11.0a 12.0f") == ("100a", "110a")
    assert moe((9, 0), "9.0") == ("90a",)  # its flags are fixed, whatever the list says
    absent = predict_moe_targets("0.6.6", capability=(12, 0), cuda=(13, 0), arch_list="9.0")
    assert "no target" in str(absent.error)


@pytest.mark.parametrize(
    ("text", "suggestion", "expected"),
    [
        ("12.0,12.1", "12.0f 12.1a", ["',' does not separate", "has no suffix"]),
        ("12.0 ", "12.0f", ["stray separator after the last entry"]),
        ("12.0f  12.1a", "12.0f 12.1a", ["stray separator"]),
        ("120f", "12.0f", ["is not MAJOR.MINOR; expected 12.0f"]),
        ("12.0", "12.0f", ["has no suffix", "plain sm_120", "expected 12.0f"]),
        ("12.0+PTX", "12.0f", ["does not know +PTX"]),
        ("12.0f", "12.0f", []),
        ("9.0a 10.0a 12.0f 12.1a", "9.0a 10.0a 12.0f 12.1a", []),
        ("9.0f", "9.0a", ["no CUDA release from 12.0 on compiles for sm_90f"]),
        ("banana", None, ["is not a target"]),
        ("13.5", None, ["no CUDA release"]),
        ("", None, ["is empty", "unset it"]),
    ],
)
def test_what_is_wrong_with_a_flashinfer_list(text: str, suggestion: str | None, expected: list[str]) -> None:
    explained = arch.explain_arch_list(text, variable=arch.FLASHINFER_LIST)
    assert explained.suggestions.get(arch.FLASHINFER_LIST) == suggestion
    messages = " | ".join(each.message for each in explained.problems)
    assert [word for word in expected if word not in messages] == []
    assert bool(explained.problems) == bool(expected)
    names = [f"FlashInfer {each.name}" for each in list_generations()]
    assert [each.reader for each in explained.readings] == names


def test_the_toolkit_decides_what_a_list_should_be() -> None:
    explained = arch.explain_arch_list("12.0f", variable=arch.FLASHINFER_LIST, cuda="12.8")
    assert explained.suggestions[arch.FLASHINFER_LIST] == "12.0a"
    assert "CUDA 12.8 does not know sm_120f; expected 12.0a" in explained.problems[0].message
    with pytest.raises(ValueError, match=r"cuda: 11\.8"):
        arch.explain_arch_list("12.0", cuda="11.8")
    with pytest.raises(ValueError, match="variable: 'CUDA_ARCH' is unknown"):
        arch.explain_arch_list("12.0", variable="CUDA_ARCH")


def test_both_variables_without_one_named() -> None:
    explained = arch.explain_arch_list("12.0,12.1")
    assert {each.variable for each in explained.problems} == {arch.FLASHINFER_LIST, arch.TORCH_LIST}
    assert explained.suggestions == {arch.FLASHINFER_LIST: "12.0f 12.1a", arch.TORCH_LIST: "12.0a;12.1a"}


@given(text=st.text(alphabet="0123456789.af ,;+PTXsm_\t", max_size=24))
def test_a_suggestion_is_read_without_error_by_every_release(text: str) -> None:
    explained = arch.explain_arch_list(text, variable=arch.FLASHINFER_LIST)
    suggestion = explained.suggestions.get(arch.FLASHINFER_LIST)
    if suggestion is None:
        assert explained.problems
        return
    again = arch.explain_arch_list(suggestion, variable=arch.FLASHINFER_LIST)
    assert again.problems == ()
    assert all(each.error is None and each.targets for each in again.readings)
    assert len({each.targets for each in again.readings}) == 1


def _by_torch(text: str) -> tuple[str, ...] | None:
    """Return how the installed torch reads the list, or None if it raises ValueError."""
    from torch.utils import cpp_extension

    with mock.patch.dict(os.environ, {arch.TORCH_LIST: text}):
        try:
            flags = cpp_extension._get_cuda_arch_flags()
        except ValueError:
            return None
    codes = [re.fullmatch(r"-gencode=arch=compute_\w+,code=(sm_)?(\w+)", flag) for flag in flags]
    return tuple(sorted(match[2] for match in codes if match))


TORCH_TEXTS = (
    "12.0 |12.0;;9.0|12.0,9.0|9.0a;12.0+PTX|8.9 9.0a|Ampere;Ada|7.5+PTX+PTX|8.9\t9.0|12.0|12.0a|12.0f|120a|"
    "9.0a+PTX|Hopper|Blackwell|Blackwell+Tegra|Turing+PTX|8.8|10.7|;|8.0a|7.2|10.3a|11.0|13.0|banana|sm_90|3.5|6.1+PTX"
)


@pytest.mark.parametrize("text", TORCH_TEXTS.split("|"))
def test_torchs_own_reading(text: str) -> None:
    """Recorded from torch 2.13; another release may know more targets."""
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the reading is that of torch 2.13, this is {torch.__version__}")
    (reading,) = arch.explain_arch_list(text, variable=arch.TORCH_LIST).readings
    expected = _by_torch(text)
    assert (tuple(sorted(reading.targets)) if reading.error is None else None) == expected


def test_torchs_suggestions_are_taken_by_torch() -> None:
    for text in ("12.0f", "12.0,12.1", "120f", "9.0 ", "8.9;12.1f"):
        explained = arch.explain_arch_list(text, variable=arch.TORCH_LIST)
        assert explained.problems
        assert _by_torch(explained.suggestions[arch.TORCH_LIST]) is not None
    assert arch.explain_arch_list("", variable=arch.TORCH_LIST).readings[0].note is not None
    assert arch.explain_arch_list("Hopper", variable=arch.TORCH_LIST).problems == ()


@pytest.mark.parametrize(
    ("text", "capability", "cuda", "targets"),
    [
        (None, "12.0", "13.0", ["120f"]),
        ("", "12.0", "13.0", ["120f"]),
        ("12.0,12.1", "12.0", "13.0", ["120f", "121a"]),
        ("12.0 12.0f 120f", "12.0", "13.0", ["120f"]),
        ("12.0f", "12.0", "12.8", ["120a"]),
        ("12.0a", "12.1", "13.0", ["120a", "121a"]),
        ("12.0a", "12.0", "13.0", ["120a"]),
        ("9.0", "12.0", "13.0", ["90a", "120f"]),
        ("12.0+PTX", "12.0", "13.0", ["120f"]),
    ],
)
def test_a_list_is_read_for_a_gpu(text: str | None, capability: str, cuda: str, targets: list[str]) -> None:
    decisions = arch.resolve_arch_list(text, capability, cuda)
    assert [decision.target for decision in decisions] == targets
    assert all(decision.reason for decision in decisions)


def test_a_list_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sm_121a needs CUDA 12\.9"):
        arch.resolve_arch_list("12.1", "12.0", "12.8")
    with pytest.raises(ValueError, match="'banana' is not a CUDA target"):
        arch.resolve_arch_list("banana", "12.0", "13.0")
