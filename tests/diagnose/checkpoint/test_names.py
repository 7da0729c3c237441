"""Names of tensors are compared with what releases read, by the table that `make release` wrote."""

from pathlib import Path

import pytest
from checkpoint_headers import FUSED, PLANTED, SOUND, Built, qwen3, write_headers

from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.checks.names import check_read
from moedoctor.diagnose.checkpoint.findings import Lint


def check(folder: Path, built: Built) -> Lint:
    checked = Lint(read_checkpoint(write_headers(folder, built)))
    check_read(checked)
    return checked


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_checkpoint_is_no_alarm(tmp_path: Path, name: str) -> None:
    assert not check(tmp_path, SOUND[name]()).findings


@pytest.mark.parametrize(
    ("planted", "tensor"),
    [
        ("experts-as-mixtral", "experts.0.w1.weight"),
        ("gate-proj-renamed", "experts.0.w1_proj.weight"),
        ("gpt-oss-blocks-renamed", "experts.down_proj_packed"),
        ("fused-foreign", "experts.w2_stacked"),
    ],
)
def test_names_that_the_newest_release_skips_are_found(tmp_path: Path, planted: str, tensor: str) -> None:
    checked = check(tmp_path, PLANTED[planted].built())
    (finding,) = checked.findings
    assert finding.check == "name_skipped"
    assert tensor in " ".join(place.tensor for place in finding.places)
    assert all("is missing" in place.value for place in finding.places)
    assert checked.names_of[-1] in finding.places[0].value


def test_one_expert_of_many_is_found(tmp_path: Path) -> None:
    built = qwen3().rename((".1.mlp.experts.3.up_proj.", ".1.mlp.experts.3.w3."))
    (finding,) = check(tmp_path, built).findings
    assert [place.tensor for place in finding.places] == ["model.layers.1.mlp.experts.3.w3.weight"]


def test_what_is_skipped_beside_whole_experts_does_no_harm(tmp_path: Path) -> None:
    more = qwen3().add(**{"model.layers.0.mlp.experts.0.extra.weight": ("BF16", (2, 2))})
    assert not check(tmp_path, more).findings


def test_a_layout_that_older_releases_skip_is_a_remark(tmp_path: Path) -> None:
    checked = check(tmp_path, FUSED["qwen3-fused"]())
    assert {finding.check for finding in checked.findings} <= {"name_skipped_before"}


@pytest.mark.parametrize("architectures", [None, "Qwen3MoeForCausalLM", [{}], ["Qwen9MoeForCausalLM"]])
def test_nothing_is_said_of_an_architecture_that_is_not_known(tmp_path: Path, architectures: object) -> None:
    built = PLANTED["experts-as-mixtral"].built().set(architectures=architectures)
    checked = check(tmp_path, built)
    assert (checked.findings, checked.names_of) == ((), ())
