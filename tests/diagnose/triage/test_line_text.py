"""Prefixes and markup of a log line are removed, and the message stays whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.triage.line_text import LINES, split_prefix

MESSAGE = "RuntimeError: b_scales is not on GPU"


@pytest.mark.parametrize(
    "line",
    [
        MESSAGE,
        f"  {MESSAGE}\r",
        f"(EngineCore_DP0 pid=123) {MESSAGE}",
        f"(RayWorkerWrapper pid=991, ip=10.1.2.3) {MESSAGE}",
        f"ERROR 02-15 10:48:11 engine.py:139] {MESSAGE}",
        f"[rank0]: {MESSAGE}",
        f"[1,0]<stderr>: {MESSAGE}",
        f"2026-04-22T10:00:00.123456789Z stderr F {MESSAGE}",
        f"2026-06-06 16:43:06,594 - {MESSAGE}",
        f"[2026-04-22 10:00:00+02:00] {MESSAGE}",
        f"Apr 22 10:00:00 gpu-node-7 docker/vllm[4711]: (Worker_TP0 pid=9) {MESSAGE}",
        f"2026-04-22T10:00:00+0200 gpu-node-7 vllm[4711]: {MESSAGE}",
        f"[pod/vllm-0/server] {MESSAGE}",
        f"vllm-1  | {MESSAGE}",
        f"\x1b[1;36m(EngineCore_DP0 pid=9)\x1b[0;0m \x1b[31m{MESSAGE}\x1b[0m",
        f"^[[31m{MESSAGE}^[[0m",
        f"#033[31m{MESSAGE}#033[0m",
        f"> > {MESSAGE}",
        f"<p dir='auto'><code>{MESSAGE}</code></p>",
        f"- [x] **{MESSAGE}**",
        json.dumps({"log": f"{MESSAGE}\n", "stream": "stderr", "time": "2026-04-22T10:00:00Z"}),
        json.dumps({"level": "error", "msg": f"\x1b[31m{MESSAGE}\x1b[0m"}),
    ],
)
def test_prefixes_are_removed_from_the_message(line: str) -> None:
    assert split_prefix(line.encode())[1] == MESSAGE


@pytest.mark.parametrize(
    "line",
    [
        *("", "   ^^^^^^^^^^^^", "~~~~~~^^^^", "-----", "━━━━━", "```", "> ", "|---|---|", "vllm-1  | "),
        "Apr 22 10:00:00 gpu7 vllm[47]: ",
    ],
)
def test_a_line_of_decoration_becomes_empty(line: str) -> None:
    assert split_prefix(line.encode())[1] == ""


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "finalizeMoeRoutingKernel<__nv_bfloat16, float>(int const*)",
            "finalizeMoeRoutingKernel<__nv_bfloat16, float>(int const*)",
        ),
        (
            "| FLASHINFER_CUTLASS | compute_120a | garbage |",
            "| FLASHINFER_CUTLASS | compute_120a | garbage |",
        ),
        ("topk_ids is -1", "topk_ids is -1"),
        ("VLLM\\_NVFP4\\_MOE\\_BACKEND", "VLLM_NVFP4_MOE_BACKEND"),
        ("a &amp;lt; b &#39;c&#39;", "a < b 'c'"),
        ('{"not": "a log line"}', '{"not": "a log line"}'),
        ('{ broken json "log"', '{ broken json "log"'),
        ("two\\nlines", "two lines"),
        ("\u201cb_scales\u201d isn\u2019t", '"b_scales" isn\'t'),
        ("vllm serve X \u2014cpu-offload-gb 4", "vllm serve X --cpu-offload-gb 4"),
    ],
)
def test_the_rest_of_a_line_stays(line: str, left: str) -> None:
    assert split_prefix(line.encode())[1] == left


def test_other_encodings_are_read_as_windows_writes_them() -> None:
    assert split_prefix("größer als –".encode("cp1252"))[1] == "größer als –"


@pytest.mark.parametrize(
    ("line", "of_vllm"),
    [
        ("(EngineCore_DP0 pid=90) ERROR 03-22 09:01:09 [core.py:1098] boom", True),
        ("2026-11-22T10:00:00Z stderr F (Worker_TP1 pid=9) boom", True),
        ("INFO 04-22 10:00:00 [core.py:700] boom", True),
        ("INFO 04-22 10:00:00 [my_service.py:700] boom", False),
        ("boom (EngineCore pid=3)", False),
    ],
)
def test_a_prefix_of_vllm_is_known(line: str, of_vllm: bool) -> None:
    prefix, text = split_prefix(line.encode())
    assert bool(LINES["of_vllm"].search(prefix)) is of_vllm
    assert text.startswith("boom")


@given(st.binary(max_size=400))
def test_any_bytes_give_one_line(line: bytes) -> None:
    assert "\n" not in split_prefix(line.replace(b"\n", b""))[1]
