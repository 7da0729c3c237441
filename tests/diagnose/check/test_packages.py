"""The fit of the installed packages with vLLM's pins, FlashInfer's kernel packages and the CUDA releases."""

import importlib.metadata
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from moedoctor.diagnose.check.packages import Fit, compare_packages
from moedoctor.fixes.backends.release_tables import load_releases


def machine(packages: Mapping[str, str], requires: tuple[str, ...] = (), **facts: str | None) -> Any:
    return SimpleNamespace(find_version=packages.get, list_requirements=lambda name: requires, facts=facts)


def fits(
    packages: Mapping[str, str],
    *,
    requires: tuple[str, ...] = (),
    torch_cuda: str | None = None,
    driver_cuda: str | None = None,
) -> dict[str, tuple[str, bool]]:
    """Return (expected release, whether it fits) by package."""
    pairs = compare_packages(machine(packages, requires, torch_cuda=torch_cuda, cuda_driver=driver_cuda))
    assert len({(fit.package, fit.by) for fit in pairs}) == len(pairs)
    return {f"{fit.package} by {fit.by.split()[0]}": (fit.expected, fit.ok) for fit in pairs}


@pytest.mark.parametrize("release", load_releases())
def test_what_a_release_pins_fits_it(release: str) -> None:
    pins = load_releases()[release]
    packages = {"vllm": release, "torch": f"{pins.torch}+cu130", "flashinfer-python": pins.flashinfer}
    if pins.flashinfer_cubin:
        packages["flashinfer-cubin"] = pins.flashinfer_cubin
    assert all(ok for _, ok in fits(packages, torch_cuda=pins.cuda, driver_cuda="13.0").values())


def test_what_is_missing_does_not_fit_but_the_cubins_may_be_missing() -> None:
    found = compare_packages(machine({"vllm": "0.19.0"}))
    assert found == (
        Fit("torch", "not installed", "2.10.0", "vllm 0.19.0", ok=False),
        Fit("flashinfer-python", "not installed", "0.6.6", "vllm 0.19.0", ok=False),
    )


def test_an_unknown_release_is_asked_for_its_own_pins() -> None:
    lines = ("torch==9.9.0", "Flashinfer-Python==8.0.0", "numpy>=2", "not a requirement !!")
    lines += ("torch==1.0; platform_machine == 'ppc64le'",)
    packages = {"vllm": "0.40.0", "torch": "9.9.0+cu150", "flashinfer-python": "7.0"}
    expected = {"torch by vllm": ("9.9.0", True), "flashinfer-python by vllm": ("8.0.0", False)}
    assert fits(packages, requires=lines) == expected


@pytest.mark.parametrize(
    ("package", "installed", "ok"),
    [
        ("flashinfer-cubin", "0.6.6", True),
        ("flashinfer-cubin", "0.6.4", False),
        ("flashinfer-jit-cache", "0.6.6+cu129", True),
        ("flashinfer-jit-cache", "0.6.66+cu129", False),
    ],
)
def test_kernel_packages_must_be_of_flashinfers_release(package: str, installed: str, ok: bool) -> None:
    found = fits({"flashinfer-python": "0.6.6", package: installed})
    assert found == {f"{package} by flashinfer-python": ("0.6.6", ok)}


@pytest.mark.parametrize(
    ("vllm", "torch_cuda", "ok"),
    [
        ("0.19.1", "12.8", True),
        ("0.19.1", "13.0", False),
        ("0.19.1+cu130", "13.0", True),
        ("0.20.0", "13.0", True),
        ("0.20.0", "12.9", False),
        ("0.20.0+cu129", "12.9", True),
    ],
)
def test_vllm_and_torch_share_a_major_release_of_cuda(vllm: str, torch_cuda: str, ok: bool) -> None:
    found = fits({"vllm": vllm}, torch_cuda=torch_cuda)
    assert found["torch's CUDA by vllm"][1] is ok


@pytest.mark.parametrize(("driver", "ok"), [("12.4", True), ("13.0", True), ("11.8", False)])
def test_a_driver_serves_every_minor_release(driver: str, ok: bool) -> None:
    found = fits({"torch": "2.10.0"}, torch_cuda="12.9", driver_cuda=driver)
    assert found == {"the driver's CUDA by torch": ("12.0 or later", ok)}


def test_text_that_is_no_version_is_compared_as_it_is() -> None:
    assert fits({"vllm": "main", "flashinfer-python": "main", "flashinfer-cubin": "main"}) == {
        "flashinfer-cubin by flashinfer-python": ("main", True)
    }


@pytest.mark.upstream
def test_the_table_says_what_the_installed_vllm_says() -> None:
    release = Version(importlib.metadata.version("vllm")).public
    lines = importlib.metadata.requires("vllm") or []
    assert f"torch=={load_releases()[release].torch}" in lines
    assert f"flashinfer-python=={load_releases()[release].flashinfer}" in lines
