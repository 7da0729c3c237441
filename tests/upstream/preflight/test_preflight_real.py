"""The installed vLLM is asked: sound checkpoints are no alarm, and planted mistakes are found and named."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_headers import PLANTED, SOUND, Built, write_headers

from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers
from moedoctor.diagnose.preflight.records import StartAnswer, Verdict

pytestmark = pytest.mark.upstream
QUESTION = Question((9, 0), 80 << 30, 8, seconds=1200)


def ask(root: Path, starts: dict[str, tuple[Built, tuple[str, ...]]]) -> dict[str, StartAnswer]:
    """Return the answer to each start, all from one child."""
    commands, headers = [], {}
    for name, (built, flags) in starts.items():
        folder = write_headers(root / name, built)
        headers |= read_headers(folder)
        commands.append(ServeCommand((str(folder), *flags), {}))
    answers = ask_release(Release("installed"), commands, QUESTION, headers)
    return dict(zip(starts, answers, strict=True))


def test_sound_checkpoints_are_no_alarm(tmp_path: Path) -> None:
    """Ten architectures in every format, at sizes 1, 2 and 8, with expert parallelism too."""
    sizes = [("1",), ("2",), ("8",), ("8", "--enable-expert-parallel")]
    starts = {
        f"{name} {' '.join(size)}": (build(), ("--max-model-len", "512", "--tensor-parallel-size", *size))
        for name, build in SOUND.items()
        for size in sizes
    }
    answers = ask(tmp_path, starts)
    wrong = {name: answer.reason for name, answer in answers.items() if answer.verdict is not Verdict.STARTS}
    # Gemma 4 has no head_dim of its own in transformers 5.2x, which releases before 0.30 do not know.
    wrong = {name: why for name, why in wrong.items() if "transformers" not in why}
    assert not wrong


def test_planted_mistakes_are_found_and_named(tmp_path: Path) -> None:
    answers = ask(tmp_path, {name: (each.built(), each.flags) for name, each in PLANTED.items()})
    missed = {}
    for name, answer in answers.items():
        text = " ".join([answer.reason, *(f"{each.message} {each.tensor}" for each in answer.findings)])
        if answer.verdict not in (Verdict.REFUSED, Verdict.WRONG) or PLANTED[name].names not in text:
            missed[name] = answer.reason
    # A release may accept a layout that another one refuses.
    assert len(missed) <= 2, missed


def test_each_backend_that_is_left_out_has_the_releases_reason(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "m", SOUND["qwen3-fp8-block"]())
    command = ServeCommand((str(folder), "--max-model-len", "512"), {})
    question = replace(QUESTION, post=True)
    (answer,) = ask_release(Release("installed"), [command], question, read_headers(folder))
    assert "after" in {stage.stage for stage in answer.stages}
    assert answer.import_seconds > 0
    reasons = {backend: reason for _, backend, reason in answer.backends}
    used = {layer.backend for layer in answer.layers if layer.kind == "experts"}
    assert len(used) == 1
    assert not used & set(reasons)
    assert "MARLIN" in reasons
    assert any("activation format" in reason for reason in reasons.values())
