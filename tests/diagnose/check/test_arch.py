"""The state of FlashInfer's JIT cache, from folders made as FlashInfer makes them."""

from pathlib import Path

import pytest

from moedoctor.diagnose.cuda.jit_cache import BASE, JitFolder, read_jit_cache


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for place in (
        "0.6.6/120/cached_ops/fused_moe_120/fused_moe_120.so",
        "0.6.6/120/cached_ops/norm/norm.so",
        "0.6.6/120/generated/fused_moe_120/fused_moe_120.cu",
        "0.7.2/120f/cached_ops/fused_moe_120/fused_moe_120.so",
        "0.7.2/90a_120f/cached_ops/batch_decode/batch_decode.so",
        "0.7.2/90a_120f/cached_ops/unfinished/build.ninja",
        "0.7.2/80/cached_ops/gemm_sm80/gemm_sm80.so",
        "cubins/a.cubin",
    ):
        file = tmp_path / ".cache" / "flashinfer" / place
        file.parent.mkdir(parents=True)
        file.touch()
    return tmp_path


@pytest.mark.parametrize("name", [BASE, "HOME"])
def test_releases_targets_and_modules(base: Path, name: str) -> None:
    cache = read_jit_cache({name: str(base)})
    assert cache.path == str(base / ".cache" / "flashinfer")
    assert cache.folders == (
        JitFolder("0.6.6", ("120",), 2, ("fused_moe_120",)),
        JitFolder("0.7.2", ("120f",), 1, ()),
        JitFolder("0.7.2", ("80",), 1, ()),
        JitFolder("0.7.2", ("90a", "120f"), 1, ()),
    )


def test_the_variable_wins_over_the_home_folder(base: Path, tmp_path: Path) -> None:
    assert read_jit_cache({BASE: str(tmp_path / "empty"), "HOME": str(base)}).folders == ()


def test_an_absent_cache_is_empty_and_stays_absent(tmp_path: Path) -> None:
    assert read_jit_cache({"HOME": str(tmp_path)}).folders == ()
    assert list(tmp_path.iterdir()) == []
