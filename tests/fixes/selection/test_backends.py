"""The selection tables against known facts of the releases, and properties of every point.

`make release` compares the tables with the release's own code at some 11,000 points. What is written down
here comes from reading the sources.
"""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fixes.backends import Candidate, requests, select
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends.release_tables import CAPABILITIES, SCHEMES, load_releases, load_tables

RELEASES = tuple(load_releases())
DATA = Path(backend_tables.__file__).parent / "data"

layers = {"capability": st.sampled_from(CAPABILITIES), "scheme": st.sampled_from(SCHEMES)}
points = st.fixed_dictionaries({**layers, "ep": st.booleans(), "dp": st.booleans()})


def candidate(backend: str, capability: str, scheme: str, release: str, **options: object) -> Candidate:
    candidates = select(capability, scheme, release=release, **options).candidates  # type: ignore[arg-type]
    return next(each for each in candidates if each.backend == backend)


FP4, FORCE = "VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_TEST_FORCE_FP8_MARLIN"
BACKEND = "VLLM_FLASHINFER_MOE_BACKEND"
BF16 = {"VLLM_USE_FLASHINFER_MOE_FP16": "1"}
FLAG, MXFP8 = "--moe-backend", "FLASHINFER_TRTLLM_MXFP4_MXFP8"
DEEP_GEMM_OFF = {"environ": {"VLLM_USE_DEEP_GEMM": "0"}}
EXPERTS_OFF = {"environ": {"VLLM_MOE_USE_DEEP_GEMM": "0"}}
VARIABLES: list[tuple[str, dict[str, str], str]] = [
    ("0.18.0", {}, "FLASHINFER_CUTLASS"),
    ("0.18.0", {FP4: "0"}, "VLLM_CUTLASS"),  # not MARLIN, as vllm#37883 takes for granted
    ("0.18.0", {FP4: "1"}, "FLASHINFER_CUTLASS"),
    ("0.18.0", {FP4: "1", BACKEND: "latency"}, "FLASHINFER_CUTLASS"),  # TRTLLM is for 10.x
    ("0.18.0", {FORCE: "1"}, "MARLIN"),
    ("0.18.0", {FP4: "1", FORCE: "1"}, "FLASHINFER_CUTLASS"),
    ("0.23.0", {FP4: "0"}, "VLLM_CUTLASS"),
    ("0.24.0", {FP4: "0"}, "FLASHINFER_CUTLASS"),  # removed
    ("0.28.0", {FORCE: "1"}, "MARLIN"),
    ("0.29.0", {FORCE: "1"}, "FLASHINFER_CUTLASS"),  # removed
]
"""On 12.0 with NVFP4: release, variables, and what it chooses."""


@pytest.mark.parametrize(
    ("release", "capability", "scheme", "options", "chosen"),
    [
        ("0.18.0", "10.0", "nvfp4", {}, "FLASHINFER_TRTLLM"),
        ("0.20.2", "11.0", "nvfp4", {}, "FLASHINFER_CUTLASS"),
        ("0.21.0", "11.0", "nvfp4", {}, "VLLM_CUTLASS"),  # FlashInfer's kernels lost 11.0 there
        ("0.32.0", "9.0", "nvfp4", {}, "HUMMING"),  # preferred on 9.0 alone, from 0.32.0 on
        ("0.32.0", "8.9", "nvfp4", {}, "MARLIN"),
        ("0.19.0", "7.0", "nvfp4", {}, None),
        ("0.20.0", "7.0", "nvfp4", {}, "EMULATION"),
        ("0.23.0", "12.0", "fp8-block", {}, "TRITON"),
        ("0.24.0", "12.0", "fp8-block", {}, "DEEPGEMM"),
        ("0.18.0", "8.9", "fp8", {}, "TRITON"),
        ("0.18.0", "8.0", "fp8", {}, "MARLIN"),
        ("0.19.1", "10.0", "bf16", {}, "TRITON"),
        ("0.20.0", "10.0", "bf16", {}, "FlashInfer TRTLLM"),
        ("0.18.0", "9.0", "fp8-block", {"ep": True}, "FLASHINFER_CUTLASS"),
        ("0.33.0", "12.0", "bf16", {"dp": True}, "TRITON"),
        ("0.33.0", "9.0", "nvfp4", {"libraries": {"humming": False}}, "MARLIN"),
        ("0.33.0", "12.0", "nvfp4", {"libraries": {"flashinfer": False}}, "VLLM_CUTLASS"),
        ("0.17.1", "9.0", "mxfp4", {"environ": {"VLLM_MXFP4_USE_MARLIN": "1"}}, "MARLIN"),
        ("0.17.1", "10.0", "bf16", {"environ": BF16}, "FlashInfer TRTLLM"),
        ("0.17.1", "9.0", "bf16", {"environ": BF16, "ep": True}, "FlashInfer CUTLASS"),
        ("0.17.1", "9.0", "bf16", {"environ": BF16, "ep": True, "dp": True}, "TRITON"),
        ("0.33.0", "9.0", "fp8-block", {"environ": {"VLLM_USE_DEEP_GEMM": "1"}}, "DEEPGEMM"),
        ("0.33.0", "12.0", "fp8-block", DEEP_GEMM_OFF, "TRITON"),
        ("0.33.0", "10.0", "fp8-block", {**DEEP_GEMM_OFF, "moe_backend": "deep_gemm"}, None),
        ("0.33.0", "10.0", "mxfp4", {**DEEP_GEMM_OFF, "moe_backend": "deep_gemm"}, None),
        ("0.33.0", "10.0", "mxfp4", {"moe_backend": "deep_gemm"}, "DEEPGEMM_MXFP4"),
        ("0.33.0", "9.0", "fp8-block", {**EXPERTS_OFF, "moe_backend": "deep_gemm"}, "DEEPGEMM"),
        ("0.27.0", "8.0", "bf16", {"moe_backend": "batched_triton"}, "BATCHED_TRITON"),  # brings its format
        *((release, "12.0", "nvfp4", {"environ": given}, chosen) for release, given, chosen in VARIABLES),
    ],
)
def test_what_a_release_selects(release, capability, scheme, options, chosen):
    selection = select(capability, scheme, release=release, **options)
    assert selection.chosen == chosen
    assert (selection.error is None) is (chosen is not None)


@pytest.mark.parametrize("release", RELEASES)
def test_only_weight_only_backends_take_weight_only_nvfp4(release: str) -> None:
    candidates = select("12.0", "nvfp4-w4a16", release=release).candidates
    taken = {each.backend for each in candidates if each.supported}
    assert {"MARLIN"} <= taken <= {"MARLIN", "HUMMING", "FLASHINFER_B12X", "B12X"}


@pytest.mark.parametrize(
    ("backend", "capability", "scheme", "release", "options", "reason"),
    [
        ("FLASHINFER_TRTLLM", "12.0", "nvfp4", "0.21.0", {}, "capability 12.0, only for 10.0 to 10.7"),
        ("VLLM_CUTLASS", "12.0", "nvfp4", "0.20.0", {"ep": True}, "expert parallelism"),
        ("VLLM_CUTLASS", "12.0", "nvfp4", "0.18.0", {"activation": "relu2_no_mul"}, "without a gate"),
        ("VLLM_CUTLASS", "12.0", "nvfp4", "0.19.0", {"activation": "relu2_no_mul"}, "would work"),
        ("FLASHINFER_CUTLASS", "12.0", "nvfp4", "0.21.0", {"activation": "gelu"}, "does not compute gelu"),
        ("AITER", "9.0", "fp8", "0.21.0", {}, "for ROCm only"),
        ("BATCHED_TRITON", "9.0", "fp8", "0.21.0", {}, "batched"),
        ("MARLIN", "12.0", "nvfp4", "0.21.0", {}, "would work; FLASHINFER_CUTLASS comes before it"),
        ("FLASHINFER_B12X", "12.0", "nvfp4", "0.22.0", {}, "on request: --moe-backend flashinfer_b12x"),
        ("FlashInfer TRTLLM", "10.0", "bf16", "0.17.1", {}, "only with VLLM_USE_FLASHINFER_MOE_FP16=1"),
        ("DEEPGEMM", "12.0", "fp8-block", "0.33.0", DEEP_GEMM_OFF, "VLLM_USE_DEEP_GEMM=0 leaves it out"),
        ("DEEPGEMM", "9.0", "fp8-block", "0.20.0", {}, "would work"),  # the first that brings DeepGEMM
        ("FLASHINFER_CUTLASS", "10.0", "fp8-block", "0.18.0", {}, "takes fp8-block on 9.0 only"),
        ("B12X", "12.0", "nvfp4", "0.33.0", {}, "would work; only on request"),  # its FlashInfer has b12x
        ("B12X", "12.0", "nvfp4", "0.32.0", {"libraries": {"b12x": True}}, "would work; only on request"),
    ],
)
def test_reasons_name_what_is_missing(backend, capability, scheme, release, options, reason):
    assert reason in candidate(backend, capability, scheme, release, **options).reason


def test_the_flag_comes_before_every_variable() -> None:
    environ = {FP4: "1", BACKEND: "throughput", FORCE: "1"}
    selection = select("12.0", "nvfp4", release="0.18.0", environ=environ, moe_backend="cutlass")
    assert (selection.chosen, selection.decided_by) == ("VLLM_CUTLASS", "--moe-backend cutlass")


@pytest.mark.parametrize(
    ("backend", "capability", "scheme", "release", "works", "how", "reason"),
    [
        # MXFP4 layers take no flag before 0.19.0, and no variable after 0.23.0.
        ("MARLIN", "9.0", "mxfp4", "0.18.0", True, "VLLM_MXFP4_USE_MARLIN=1", "runs with"),
        ("MARLIN", "9.0", "mxfp4", "0.19.0", True, "--moe-backend marlin", "runs with"),
        ("MARLIN", "12.0", "mxfp4", "0.18.0", True, None, "chosen by itself"),
        ("MARLIN", "10.0", "mxfp4", "0.18.0", False, None, "no flag or variable"),
        (MXFP8, "10.0", "mxfp4", "0.21.0", True, "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1", "runs with"),
        ("FLASHINFER_TRTLLM", "12.0", "nvfp4", "0.33.0", False, f"{FLAG} flashinfer_trtllm", "10.0 to 10.7"),
        ("cutlass", "9.0", "fp8", "0.33.0", False, None, "is refused"),
    ],
)
def test_the_way_to_ask_is_one_that_the_release_has(backend, capability, scheme, release, works, how, reason):
    asked = requests.request(backend, capability, scheme, release=release)
    assert (asked.works, asked.how) == (works, how)
    assert reason in asked.reason


@given(points, st.sampled_from(RELEASES), st.data())
def test_request_matches_select(point: dict, release: str, data: st.DataObject) -> None:
    where = {"ep": point["ep"], "dp": point["dp"], "release": release}
    shown = select(point["capability"], point["scheme"], **where).candidates
    each = data.draw(st.sampled_from(shown))
    asked = requests.request(each.backend, point["capability"], point["scheme"], **where)
    if asked.how is None:
        return
    if asked.how.startswith("--moe-backend "):
        done = select(point["capability"], point["scheme"], moe_backend=asked.how.split()[1], **where)
    else:
        environ = dict(part.split("=") for part in asked.how.split())
        done = select(point["capability"], point["scheme"], environ=environ, **where)
    assert (done.chosen is not None) is asked.works
    if asked.works:
        assert done.chosen == asked.backend


@given(points, st.sampled_from(RELEASES), st.data())
def test_every_point_has_a_complete_answer(point: dict, release: str, data: st.DataObject) -> None:
    activation = data.draw(st.sampled_from(load_releases()[release].activations))
    selection = select(**point, release=release, activation=activation)
    names = [each.backend for each in selection.candidates]
    assert len(names) == len(set(names))
    chosen = [each for each in selection.candidates if each.chosen]
    assert [each.backend for each in chosen] == ([selection.chosen] if selection.chosen else [])
    automatic = [each for each in selection.candidates if each.automatic]
    assert selection.chosen == next((each.backend for each in automatic if each.supported), None)
    for each in selection.candidates:
        assert each.reason
        assert bool(each.kernels) is each.supported
        assert each.reason.startswith(("chosen", "would work")) is each.supported


@given(points, st.sampled_from(RELEASES), st.sampled_from(["flashinfer", "humming", "deep_gemm"]))
def test_a_missing_library_never_adds_a_backend(point: dict, release: str, library: str) -> None:
    with_it = {each.backend for each in select(**point, release=release).candidates if each.supported}
    without = select(**point, release=release, libraries={library: False}).candidates
    assert {each.backend for each in without if each.supported} <= with_it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capability": "9.5"}, "capability 9.5: expected one of 7.0"),
        ({"scheme": "int4"}, "scheme int4: expected one of nvfp4"),
        ({"release": "0.34.0"}, "release 0.34.0: the tables know 0.17.1 to 0.33.0"),
        ({"activation": "situ", "release": "0.17.1"}, "activation situ: vLLM 0.17.1 knows silu"),
    ],
)
def test_unknown_arguments_are_refused(arguments: dict[str, str], message: str) -> None:
    everything = {"capability": "9.0", "scheme": "nvfp4", "release": "0.33.0", **arguments}
    with pytest.raises(ValueError, match=re.escape(message)):
        select(**everything)  # type: ignore[arg-type]


def test_flags_that_a_release_does_not_take() -> None:
    unknown = select("12.0", "nvfp4", release="0.18.0", moe_backend="humming")
    assert unknown.chosen is None
    assert "--moe-backend humming is not one of aiter, auto" in (unknown.error or "")
    other = select("12.0", "nvfp4", release="0.18.0", moe_backend="triton")
    assert "not for nvfp4" in (other.error or "")
    ignored = select("9.0", "mxfp4", release="0.18.0", moe_backend="marlin")
    assert (ignored.chosen, ignored.decided_by) == ("TRITON", "automatic")
    named = select("12.0", "nvfp4", release="0.18.0", environ={FP4: "1", BACKEND: "masked_gemm"})
    assert named.chosen is None
    assert "FLASHINFER_CUTEDSL was asked for" in (named.error or "")
    with pytest.raises(ValueError, match=r"not a MoE backend of vLLM 0\.18\.0 for nvfp4; it has FLASH"):
        requests.request("BANANA", "12.0", "nvfp4", release="0.18.0")


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        *((value, "marlin") for value in ("MARLIN", "marlin", " Marlin ")),
        *(("VLLM_CUTLASS", "cutlass"), ("FLASHINFER-CUTLASS", "flashinfer_cutlass"), ("HUMMING", None)),
    ],
)
def test_what_the_variable_of_38971_asks_for(value: str, flag: str | None) -> None:
    asked = requests.read_wanted_backend({requests.NVFP4_VARIABLE: value}, "0.21.0")
    assert asked is not None
    assert asked.flag == flag
    problem = "0.21.0 has no such NVFP4 MoE backend; it has cutlass"
    assert (asked.problem is None) if flag else (problem in (asked.problem or ""))


def test_without_the_variable_of_38971_nothing_is_asked_for() -> None:
    assert requests.read_wanted_backend({}, "0.21.0") is None
    assert requests.read_wanted_backend({requests.NVFP4_VARIABLE: "auto"}, "0.21.0") is None


def test_variables_with_an_effect() -> None:
    assert set(requests.find_governing_variables("nvfp4", "0.18.0")) == {FP4, BACKEND, FORCE}
    assert set(requests.find_governing_variables("nvfp4", "0.24.0")) == {FORCE}
    assert set(requests.find_governing_variables("nvfp4", "0.29.0")) == set()
    deep_gemm = {"VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"}
    assert set(requests.find_governing_variables("fp8", "0.33.0")) == deep_gemm
    shadowed = requests.find_shadowed_variables("nvfp4", "0.18.0", {FP4: "1", FORCE: "1"})
    assert shadowed == {FORCE: f"{FP4}=1 comes before it"}
    assert requests.find_shadowed_variables("nvfp4", "0.18.0", {FP4: "0", FORCE: "1"}) == {}
    assert FP4 in requests.find_shadowed_variables("nvfp4", "0.18.0", {BACKEND: "throughput"})[BACKEND]
    assert requests.find_shadowed_variables("nvfp4", "0.18.0", {FP4: "1", BACKEND: "latency"}) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_generated_row_has_a_source(scheme: str) -> None:
    generated = json.loads((DATA / f"{scheme}.json").read_text(encoding="utf-8"))
    for row in (*generated["orders"], *generated["flags"], *generated["kernels"]):
        first = row["releases"].partition("-")[0]
        assert re.fullmatch(rf"{re.escape(first)}: vllm/[\w/]+\.py:\d+", row["source"]), row


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_tables_fit_together(scheme: str) -> None:
    for release in RELEASES:
        table = load_tables(scheme, release)
        have = {row.backend for row in table.kernels}
        assert {row for order in table.orders for row in order.backends} <= have, release
        assert {row for flag in table.flags.values() for row in flag.backends} <= have, release
        assert set(table.flags) <= set(load_releases()[release].moe_backends), release
        assert all(row.source for row in (*table.orders, *table.overrides, *table.kernels)), release
        for point in product(CAPABILITIES, backend_tables.PARALLEL, load_releases()[release].activations):
            assert len({row.backends for row in table.orders if row.contains(point)}) == 1, (release, point)
