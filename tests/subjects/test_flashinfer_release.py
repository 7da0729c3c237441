"""Subjects `flashinfer@X.Y.Z`: their names, their requirements, and their cases."""

import zipfile
from pathlib import Path

import pytest

from moedoctor import catalogue
from moedoctor.commands.options import InputError
from moedoctor.commands.run import _read_sources
from moedoctor.results import Tier
from moedoctor.runner.plan import Options, Plan, plan
from moedoctor.scenario.targets import load_targets
from moedoctor.subjects.flashinfer_release import FlashInferReleaseSubject
from moedoctor.upstream.flashinfer.source import KERNELS

GPU = {"gpu": "an H200", "torch": "2.11.0", "torch_cuda": "13.0"}
SUBJECT = FlashInferReleaseSubject()


def wheel(folder: Path, release: str = "0.6.13") -> Path:
    path = folder / f"flashinfer_python-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"flashinfer/data/{KERNELS}", "")
        packed.writestr(f"flashinfer_python-{release}.dist-info/METADATA", "")
    return path


def make_plan(name: str, *sources: str) -> Plan:
    return plan(load_targets((name,)), Options(sources=dict.fromkeys(sources, "/a")), GPU)[0]


def test_only_the_names_of_releases_are_its_own() -> None:
    for name in ("flashinfer@0.6.6", "flashinfer@0.7.2.post1"):
        assert catalogue.find_subject_kind(name) == "flashinfer"
    for name in ("flashinfer", "flashinfer@", "flashinfer@0.6", "vllm@0.6.6"):
        assert not SUBJECT.owns(name)


def test_it_needs_its_sources_and_a_gpu() -> None:
    fault, tier = catalogue.load_faults()["MD011"], Tier.KERNEL
    without = SUBJECT.unavailable(fault, "flashinfer@0.6.6", tier, {}, GPU)
    assert without == "give its sources: --flashinfer 0.6.6=PATH (a wheel or an unpacked folder)"
    sources = {"flashinfer@0.6.6": "/somewhere"}
    assert "needs an NVIDIA GPU" in str(SUBJECT.unavailable(fault, "flashinfer@0.6.6", tier, sources, {}))
    assert SUBJECT.unavailable(fault, "flashinfer@0.6.6", tier, sources, GPU) is None


def test_named_releases_become_cases_in_the_order_of_their_versions() -> None:
    made = make_plan("MD011", "flashinfer@0.6.13", "flashinfer@0.6.6")
    found = list(dict.fromkeys(item.case.subject for item in made.cases))
    assert found == ["faulty", "fixed", "installed", "flashinfer@0.6.6", "flashinfer@0.6.13"]
    assert {item.case.tier for item in made.cases if "@" in item.case.subject} == {Tier.KERNEL}
    units = [item.request.unit for item in made.claims["boundary"]]
    assert units == found[3:], "each release is a unit of the measured claims"


def test_a_fault_that_does_not_use_flashinfer_gets_no_such_cases() -> None:
    made = make_plan("MD001", "flashinfer@0.6.6", "vllm@0.19.1")
    names = {item.case.subject for item in made.cases}
    assert "vllm@0.19.1" in names
    assert "flashinfer@0.6.6" not in names


def test_the_option_takes_a_wheel_of_that_release(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    assert _read_sources([], [f"0.6.13={path}"]) == {"flashinfer@0.6.13": str(path)}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["0.6.13"], "expected X.Y.Z=PATH"),
        (["0.6=PATH"], "expected X.Y.Z=PATH"),
        (["0.6.13=PATH", "0.6.13=PATH"], "given twice"),
        (["0.6.14=PATH"], "is release 0.6.13, not 0.6.14"),
        (["0.6.13=/nowhere"], "no FlashInfer sources"),
    ],
)
def test_the_option_refuses_in_one_line(tmp_path: Path, given: list[str], error: str) -> None:
    path = str(wheel(tmp_path))
    with pytest.raises(InputError, match=error) as refused:
        _read_sources([], [source.replace("PATH", path) for source in given])
    assert len(str(refused.value).splitlines()) == 1
