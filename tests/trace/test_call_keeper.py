"""Which call a recording keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from moedoctor.trace.call_keeper import Wish
from tests.interpreted import needs_triton, run_check


@needs_triton
def test_the_call_that_was_asked_for_is_kept() -> None:
    assert run_check(Path(__file__).parent / "interpreted_keep.py").strip() == "agreed"


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("nan", Wish("nan")),
        ("first", Wish("first")),
        ("crash", Wish("crash")),
        ("call=model.layers.3.mlp.experts:17", Wish("call", "model.layers.3.mlp.experts", 17)),
        ("mismatch=0.01", Wish("mismatch", rate=0.01)),
    ],
)
def test_a_wish_is_read(text: str, wish: Wish) -> None:
    assert Wish.parse(text) == wish


@pytest.mark.parametrize(
    "text", ["nan=1", "call=3", "call=:3", "call=a:0", "mismatch=2", "mismatch=x", "all"]
)
def test_a_wish_that_cannot_be_read_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="expected nan, first, crash, call=LAYER:N or mismatch=RATE"):
        Wish.parse(text)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_kernel_compiles(capability: int) -> None:
    """Compiled without a GPU, because the interpreter takes what the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moedoctor.kernels.keep import keep_kernel

    constants = {"room": 64, "hidden": 2048, "top_k": 8, "BLOCK": 2048, "BLOCK_K": 8}
    types = {
        **dict.fromkeys(("x_ptr", "output_ptr", "kept_x_ptr", "kept_output_ptr"), "*bf16"),
        **dict.fromkeys(("ids_ptr", "header_ptr", "row_ptr", "kept_ids_ptr"), "*i32"),
        **dict.fromkeys(("weights_ptr", "kept_weights_ptr"), "*fp32"),
        **dict.fromkeys(("stride_x", "stride_output", "layer"), "i32"),
    }
    signature = {name: types.get(name, "constexpr") for name in keep_kernel.arg_names}
    source = ASTSource(keep_kernel, signature, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert "atom" in kernel.asm["ptx"]
