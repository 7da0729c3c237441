"""`moedoctor replay` and `moedoctor capsule`, as a person calls them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moedoctor.cli import main
from moedoctor.commands.bench.backends import find_routing
from moedoctor.commands.options import InputError
from moedoctor.models.layer_shape import LayerShape
from moedoctor.trace.capsule import load, save
from tests.capsules import computation, make_capsule, noisy, with_output

pytestmark = pytest.mark.usefixtures("replayed_here")


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule whose gate and up halves were swapped, made once."""
    capsule = make_capsule("nvfp4")
    output = noisy(computation(capsule).compute_contributions((("w13", "gate_up_swapped"),)).sum(1))
    path = tmp_path_factory.mktemp("capsule") / "wrong.moecapsule"
    save(with_output(capsule, output), path)
    return path


@pytest.fixture
def wrong(swapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that capsule in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(swapped, "wrong.moecapsule"))


@pytest.mark.slow
def test_a_wrong_output_is_named_and_found(wrong, replayed_here, capsys):
    replayed_here.add(True)
    assert main(["replay", str(wrong), "--backend", "OURS,REFERENCE,MARLIN", "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "replay"
    assert document["summary"]["exit_code"] == 1
    assert document["right"] is False
    assert document["diagnosis"]["explanation"]["mistakes"] == ["gate_up_swapped"]
    best, next_best = document["diagnosis"]["explanation"], document["diagnosis"]["runner_up"]
    for shares in ("token_shares", "expert_shares"):
        assert best[shares]
        assert all(row["share_explained"] > 0.99 for row in best[shares])
        assert min(row["share_explained"] for row in next_best[shares]) < 0.9
    rows = {row["backend"]: row for row in document["backends"]}
    ours, reference, marlin = (rows[name] for name in ("OURS", "REFERENCE", "MARLIN"))
    for row in (ours, reference):
        assert (row["right"], row["repeats"], row["deterministic"]) == (True, False, True)
    assert marlin["right"] is None
    assert marlin["unavailable"]


def test_what_nothing_explains_is_said_with_what_is_right_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    capsule = make_capsule("nvfp4")
    broken = (capsule.tensors["topk_ids"] == 5).any(1)  # [T]
    assert 1 < int(broken.sum()) < len(broken)
    output = capsule.tensors["output"].masked_fill(broken[:, None], float("nan"))  # [T, H]
    save(with_output(capsule, output), Path("nan.moecapsule"))
    assert main(["replay", "nan.moecapsule", "--backend", "OURS", "--format", "json"]) == 1
    printed = capsys.readouterr()
    assert "all of them, and no finite token, use expert 5; none of the known mistakes" in printed.err
    assert "on this machine OURS is right" in printed.err
    machine = json.loads(printed.out)["environment"]
    assert {"gpu", "driver", "torch", "vllm"} <= machine.keys()
    for format, shown in (("table", False), ("markdown", True), ("html", True)):
        assert main(["replay", "nan.moecapsule", "--format", format]) == 1
        assert ("cuda_driver" in capsys.readouterr().out) == shown


def test_a_copy_without_weights_is_not_judged(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capsule", "copy", str(wrong), "bare.moecapsule", "--without-weights"]) == 0
    assert load(Path("bare.moecapsule")).record.weights == "none"
    assert main(["capsule", "show", "bare.moecapsule"]) == 0
    assert "(none," in capsys.readouterr().out
    assert main(["replay", "bare.moecapsule"]) == 0
    assert "not judged" in capsys.readouterr().out


def test_a_call_without_output_says_what_the_backends_computed(wrong, capsys):
    capsule = load(wrong)
    inputs = {name: tensor for name, tensor in capsule.tensors.items() if name != "output"}
    save(replace(capsule, tensors=inputs), Path("died.moecapsule"))
    assert main(["replay", "died.moecapsule", "--backend", "OURS,MARLIN"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on this machine OURS is right; MARLIN is not available" in text
    assert "--backend all" not in text
    assert "moedoctor triage LOG" in text
    assert main(["capsule", "show", "died.moecapsule"]) == 0
    assert "judges the recorded output" not in capsys.readouterr().out


def test_bench_takes_the_ids_of_a_capsule(wrong: Path) -> None:
    capsule = load(wrong)
    record = capsule.record
    shape = LayerShape(record.hidden, record.intermediate, record.experts, record.top_k)
    name, routing = find_routing(str(wrong), None, {"custom": (shape, "command line")})
    assert name == "capsule wrong.moecapsule"
    assert routing.rows == capsule.tensors["topk_ids"].tolist()
    with pytest.raises(InputError, match="it is of 8 experts, top 3; other has 16, top 3"):
        find_routing(str(wrong), None, {"other": (replace(shape, experts=16), "command line")})


def test_a_run_describes_a_capsule(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "gate_up_order", "--subject", "installed", "--capsule"]
    assert main([*arguments, str(wrong), "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "## wrong.moecapsule" in text
    assert "the gate and up halves of w13 swapped (MD017)" in text
    assert main([*arguments, "nothing.moecapsule"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_weights_with_scales_of_blocks_go_to_the_backends_for_blocks(tmp_path, capsys):
    path = tmp_path / "blocks.moecapsule"
    save(make_capsule("fp8", "fp8_block"), path)
    arguments = ["replay", str(path), "--backend", "OURS,TRITON", "--device", "cpu", "--format", "json"]
    assert main(arguments) == 0
    backends = json.loads(capsys.readouterr().out)["backends"]
    found = {each["backend"]: each["quantization"] for each in backends}
    assert found == dict.fromkeys(("OURS", "TRITON"), "fp8-block")
    (ours,) = (found for found in backends if found["backend"] == "OURS")
    assert ours["right"]
