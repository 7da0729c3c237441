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

from moedoctor.fixes.backends import Candidate, select
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends.release_tables import CAPABILITIES, SCHEMES, load_releases, load_tables
from moedoctor.fixes.backends.requests import (
    NVFP4_VARIABLE,
    find_governing_variables,
    find_shadowed_variables,
    find_way_to_ask,
    read_wanted_backend,
    request,
)
from tests.cases import load_cases

CASES = load_cases(__file__)

RELEASES = tuple(load_releases())
DATA = Path(backend_tables.__file__).parent / "data"

points = st.fixed_dictionaries(
    {
        "capability": st.sampled_from(CAPABILITIES),
        "scheme": st.sampled_from(SCHEMES),
        "ep": st.booleans(),
        "dp": st.booleans(),
    }
)


def candidate(backend: str, capability: str, scheme: str, release: str, **options: object) -> Candidate:
    candidates = select(capability, scheme, release=release, **options).candidates  # type: ignore[arg-type]
    return next(each for each in candidates if each.backend == backend)


FP4, BACKEND, FORCE = (
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_FLASHINFER_MOE_BACKEND",
    "VLLM_TEST_FORCE_FP8_MARLIN",
)


@pytest.mark.parametrize(
    ("release", "capability", "scheme", "options", "chosen"), CASES["what_a_release_selects"]
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
    ("backend", "capability", "scheme", "release", "options", "supported"),
    CASES["which_layers_a_backend_takes"],
)
def test_which_layers_a_backend_takes(backend, capability, scheme, release, options, supported):
    assert candidate(backend, capability, scheme, release, **options).supported is supported


@pytest.mark.parametrize(
    ("backend", "capability", "scheme", "release", "options", "reason"), CASES["reasons_name_what_is_missing"]
)
def test_reasons_name_what_is_missing(backend, capability, scheme, release, options, reason):
    assert reason in candidate(backend, capability, scheme, release, **options).reason


@pytest.mark.parametrize(
    ("release", "environ", "chosen"), CASES["variables_have_the_effect_of_their_release"]
)
def test_variables_have_the_effect_of_their_release(release, environ, chosen):
    selection = select("12.0", "nvfp4", release=release, environ=environ)
    assert selection.chosen == chosen
    if chosen is None:
        assert "FLASHINFER_CUTEDSL was asked for" in (selection.error or "")


def test_the_flag_comes_before_every_variable() -> None:
    environ = {FP4: "1", BACKEND: "throughput", FORCE: "1"}
    selection = select("12.0", "nvfp4", release="0.18.0", environ=environ, moe_backend="cutlass")
    assert (selection.chosen, selection.decided_by) == ("VLLM_CUTLASS", "--moe-backend cutlass")


@pytest.mark.parametrize(
    ("backend", "capability", "scheme", "release", "works", "how", "reason"),
    CASES["the_way_to_ask_is_one_that_the_release_has"],
)
def test_the_way_to_ask_is_one_that_the_release_has(backend, capability, scheme, release, works, how, reason):
    asked = request(backend, capability, scheme, release=release)
    assert (asked.works, asked.how) == (works, how)
    assert reason in asked.reason


def test_a_flag_that_is_ignored_has_another_way() -> None:
    assert find_way_to_ask("marlin", "mxfp4", "0.18.0") == "VLLM_MXFP4_USE_MARLIN=1"
    assert find_way_to_ask("banana", "mxfp4", "0.18.0") is None


@given(points, st.sampled_from(RELEASES), st.data())
def test_request_matches_select(point: dict, release: str, data: st.DataObject) -> None:
    where = {"ep": point["ep"], "dp": point["dp"], "release": release}
    shown = select(point["capability"], point["scheme"], **where).candidates
    each = data.draw(st.sampled_from(shown))
    asked = request(each.backend, point["capability"], point["scheme"], **where)
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


@pytest.mark.parametrize(("arguments", "message"), CASES["unknown_arguments_are_refused"])
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
    with pytest.raises(ValueError, match=r"not a MoE backend of vLLM 0\.18\.0 for nvfp4; it has FLASH"):
        request("BANANA", "12.0", "nvfp4", release="0.18.0")


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        *((value, "marlin") for value in ("MARLIN", "marlin", " Marlin ")),
        *(("VLLM_CUTLASS", "cutlass"), ("FLASHINFER-CUTLASS", "flashinfer_cutlass"), ("HUMMING", None)),
    ],
)
def test_what_the_variable_of_38971_asks_for(value: str, flag: str | None) -> None:
    asked = read_wanted_backend({NVFP4_VARIABLE: value}, "0.21.0")
    assert asked is not None
    assert asked.flag == flag
    problem = "0.21.0 has no such NVFP4 MoE backend; it has cutlass"
    assert (asked.problem is None) if flag else (problem in (asked.problem or ""))


def test_without_the_variable_of_38971_nothing_is_asked_for() -> None:
    assert (
        read_wanted_backend({}, "0.21.0") is read_wanted_backend({NVFP4_VARIABLE: "auto"}, "0.21.0") is None
    )


def test_variables_with_an_effect() -> None:
    assert set(find_governing_variables("nvfp4", "0.18.0")) == {FP4, BACKEND, FORCE}
    assert set(find_governing_variables("nvfp4", "0.24.0")) == {FORCE}
    assert set(find_governing_variables("nvfp4", "0.29.0")) == set()
    assert set(find_governing_variables("fp8", "0.33.0")) == {"VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"}
    assert find_shadowed_variables("nvfp4", "0.18.0", {FP4: "1", FORCE: "1"}) == {
        FORCE: f"{FP4}=1 comes before it"
    }
    assert find_shadowed_variables("nvfp4", "0.18.0", {FP4: "0", FORCE: "1"}) == {}
    assert FP4 in find_shadowed_variables("nvfp4", "0.18.0", {BACKEND: "throughput"})[BACKEND]
    assert find_shadowed_variables("nvfp4", "0.18.0", {FP4: "1", BACKEND: "latency"}) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_generated_row_has_a_source(scheme: str) -> None:
    generated = json.loads((DATA / f"{scheme}.json").read_text(encoding="utf-8"))
    for row in (*generated["orders"], *generated["flags"], *generated["kernels"]):
        first = row["releases"].partition("-")[0]
        assert re.fullmatch(rf"{re.escape(first)}: vllm/[\w/]+\.py:\d+", row["source"]), row


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("release", RELEASES)
def test_the_tables_fit_together(scheme: str, release: str) -> None:
    table = load_tables(scheme, release)
    have = {row.backend for row in table.kernels}
    assert {row for order in table.orders for row in order.backends} <= have
    assert {row for flag in table.flags.values() for row in flag.backends} <= have
    assert set(table.flags) <= set(load_releases()[release].moe_backends)
    assert all(row.source for row in (*table.orders, *table.overrides, *table.kernels))
    for point in product(CAPABILITIES, backend_tables.PARALLEL, load_releases()[release].activations):
        assert len({row.backends for row in table.orders if row.contains(point)}) == 1
