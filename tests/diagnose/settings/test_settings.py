"""Settings that do not take effect, per release: the facts about each variable, each kind of problem, and no
false alarm."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.settings import tables
from moedoctor.diagnose.settings.flags import find_moe_backend
from moedoctor.diagnose.settings.settings import check_settings
from moedoctor.diagnose.settings.tables import SettingFinding, load_vllm_flags, load_vllm_variables
from moedoctor.diagnose.triage.signatures import load_data
from moedoctor.fixes.backends.release_tables import SCHEMES, load_releases

RELEASES = load_vllm_variables().releases


def only_finding(release: str, setting: str, command: str = "", **options: str) -> SettingFinding | None:
    """Return the only finding about NAME=VALUE or about a command line."""
    environ = dict([setting.split("=", 1)]) if setting else {}
    found = check_settings(release, environ, command.split(), **options)  # type: ignore[arg-type]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.parametrize(
    ("release", "setting", "problem", "instead"),
    [
        ("0.33.0", "VLLM_NVFP4_MOE_BACKEND=MARLIN", "unknown", "--moe-backend marlin"),
        ("0.24.0", "VLLM_FLASHINFER_MOE_BACKEND=throughput", "removed", "--moe-backend flashinfer_cutlass"),
        ("0.24.0", "VLLM_USE_FLASHINFER_MOE_FP4=0", "removed", "--moe-backend cutlass (or marlin)"),
        ("0.29.0", "VLLM_TEST_FORCE_FP8_MARLIN=1", "removed", "--moe-backend marlin"),
        ("0.23.0", "VLLM_WSL2_ENABLE_PIN_MEMORY=1", "not_yet", None),
        ("0.33.0", "VLLM_USE_DEEPGEMM=1", "misspelt", "VLLM_USE_DEEP_GEMM=1"),
        ("0.33.0", "VLLM_SOMETHING_ELSE_ALTOGETHER=1", "unknown", None),
        ("0.33.0", "vllm_use_deep_gemm=1", "wrong_case", "VLLM_USE_DEEP_GEMM=1"),
        ("0.18.0", "VLLM_NVFP4_GEMM_BACKEND=MARLIN", "wrong_case", "VLLM_NVFP4_GEMM_BACKEND=marlin"),
        (
            "0.18.0",
            "VLLM_FLASHINFER_MOE_BACKEND=throughputs",
            "invalid",
            "VLLM_FLASHINFER_MOE_BACKEND=throughput",
        ),
        ("0.18.0", "VLLM_USE_FLASHINFER_MOE_FP4=true", "invalid", "VLLM_USE_FLASHINFER_MOE_FP4=1"),
        ("0.18.0", "VLLM_TEST_FORCE_FP8_MARLIN=yes", "silently_off", "VLLM_TEST_FORCE_FP8_MARLIN=1"),
        ("0.18.0", "VLLM_FLASHINFER_MOE_BACKEND=latency", "shadowed", None),
        ("0.33.0", "VLLM_PORT=tcp://10.0.0.1:80", "invalid", None),
        ("0.33.0", "FLASHINFER_FORCE_SM=120f", "unknown", None),
        ("0.33.0", "FLASHINFER_CUDA_ARCHLIST=12.0f", "misspelt", "FLASHINFER_CUDA_ARCH_LIST=12.0f"),
        ("0.17.1", "FLASHINFER_AUTOTUNE_DIR=/tmp/x", "not_yet", None),
    ],
)
def test_what_does_not_take_effect(release: str, setting: str, problem: str, instead: str | None) -> None:
    found = only_finding(release, setting)
    assert (found.problem, found.instead, found.takes_effect) == (problem, instead, False)
    assert found.setting == setting


@pytest.mark.parametrize(
    ("release", "setting"),
    [
        ("0.18.0", "VLLM_TEST_FORCE_FP8_MARLIN=TRUE"),  # read in lower case
        ("0.18.0", "VLLM_TEST_FORCE_FP8_MARLIN=false"),
        ("0.18.0", "VLLM_USE_FLASHINFER_MOE_FP4=0"),
        ("0.33.0", "VLLM_LOGGING_LEVEL=DEBUG"),
        ("0.33.0", "VLLM_SERVICE_HOST=10.0.0.1"),  # Kubernetes
        ("0.33.0", "VLLM_PORT_8000_TCP_ADDR=10.0.0.1"),
        ("0.33.0", "VLLM_CUSTOM_ALLREDUCE_ALGO=1"),  # read by compiled code alone
        ("0.33.0", "vllm_home=/srv"),  # somebody's own
        ("0.33.0", "FLASHINFER_CUDA_ARCH_LIST=12.0f"),
        ("0.17.1", "FLASHINFER_WORKSPACE_BASE=/tmp"),
        ("0.33.0", "VLLM_USE_DEEP_GEMM=1"),
        ("0.33.0", "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    ],
)
def test_no_false_alarm(release: str, setting: str) -> None:
    assert only_finding(release, setting) is None


def test_what_takes_effect_but_not_as_it_seems() -> None:
    linear = only_finding("0.18.0", "VLLM_NVFP4_GEMM_BACKEND=marlin")
    assert (linear.problem, linear.takes_effect) == ("other_layers", True)
    going = only_finding("0.22.0", "VLLM_MXFP4_USE_MARLIN=1")
    assert (going.problem, going.takes_effect, going.instead) == ("deprecated", True, "--moe-backend marlin")
    other = only_finding("0.18.0", "VLLM_USE_FLASHINFER_MOE_FP8=1", scheme="nvfp4")
    assert (other.problem, other.takes_effect) == ("other_layers", True)


def test_a_setting_can_hide_another() -> None:
    environ = {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_TEST_FORCE_FP8_MARLIN": "1"}
    (found,) = check_settings("0.18.0", environ, scheme="nvfp4")
    assert (found.setting, found.problem) == ("VLLM_TEST_FORCE_FP8_MARLIN=1", "shadowed")
    assert "VLLM_USE_FLASHINFER_MOE_FP4=1 comes before it" in found.message
    command = ["vllm", "serve", "m", "--moe-backend", "cutlass"]
    flagged = check_settings("0.18.0", environ, command, scheme="nvfp4")
    assert [finding.problem for finding in flagged] == ["shadowed"] * 2
    assert all("--moe-backend cutlass" in finding.message for finding in flagged)


@pytest.mark.parametrize(("scheme", "effect"), [("fp8-block", True), ("mxfp4", False)])
def test_a_switch_of_linear_layers_too_takes_effect_beside_the_flag(scheme: str, effect: bool) -> None:
    command = ["vllm", "serve", "m", "--moe-backend", "triton"]
    (found,) = check_settings("0.33.0", {"VLLM_USE_DEEP_GEMM": "0"}, command, scheme=scheme)
    assert found.takes_effect is effect


@pytest.mark.parametrize(
    ("release", "command", "problem", "instead"),
    [
        ("0.18.0", "--moe-backed marlin", "misspelt", "--moe-backend marlin"),
        ("0.18.0", "--moe-backend=martin", "invalid", "--moe-backend marlin"),
        ("0.18.0", "--moe-backend humming", "invalid", None),
        ("0.18.0", "--linear-backend marlin", "not_yet", None),
        ("0.33.0", "--swap-space 4", "removed", None),
        ("0.33.0", "--moe-expert-cache-size 8", "unknown", None),
        ("0.33.0", "--all2all-backend Naive", "wrong_case", "--all2all-backend naive"),
        ("0.33.0", "--kernel-config.moe-backend=marlin", "invalid", "--kernel-config.moe_backend=marlin"),
        ("0.33.0", "--moe-backend marlin --moe-backend cutlass", "shadowed", None),
        ("0.33.0", '--kernel-config {"moe_backend":"cutlass"} --moe-backend marlin', "shadowed", None),
    ],
)
def test_flags_that_do_not_take_effect(release: str, command: str, problem: str, instead: str | None) -> None:
    found = only_finding(release, "", f"vllm serve MODEL {command}")
    assert (found.problem, found.instead, found.takes_effect) == (problem, instead, False)


@pytest.mark.parametrize(
    ("command", "moe_backend"),
    [
        ("vllm serve m", "auto"),
        ("vllm serve m --moe_backend=Flashinfer-Cutlass", "flashinfer_cutlass"),
        ("vllm serve m --moe-back marlin", "marlin"),
        ('vllm serve m --kernel-config {"moe_backend":"marlin"}', "marlin"),
        ("vllm serve m --kernel-config.moe_backend marlin", "marlin"),
        ('vllm serve m --moe-backend auto --kernel-config {"moe_backend":"marlin"}', "marlin"),
        ('vllm serve m --moe-backend cutlass --kernel-config {"moe_backend":"marlin"}', "cutlass"),
        ("vllm serve m --no-enable-prefix-caching --served-model-name x", "auto"),
        ("python -m vllm.entrypoints.openai.api_server --model m --moe-backend marlin", "marlin"),
    ],
)
def test_command_lines_are_read_as_vllm_reads_them(command: str, moe_backend: str) -> None:
    """The parsers of vLLM 0.17.1, 0.24.0 and 0.33.0 gave these results without an error."""
    for release in ("0.17.1", "0.24.0", "0.33.0"):
        assert find_moe_backend(command.split(), release) == moe_backend
        problems = [finding.problem for finding in check_settings(release, {}, command.split())]
        assert problems == (["shadowed"] if moe_backend == "cutlass" else [])


def test_a_flag_that_is_ignored_for_a_scheme() -> None:
    found = only_finding("0.18.0", "", "vllm serve m --moe-backend marlin", scheme="mxfp4")
    assert (found.problem, found.instead) == ("ignored", "VLLM_MXFP4_USE_MARLIN=1")
    # An ignored flag does not hide the variable.
    flag = ["--moe-backend", "marlin"]
    findings = check_settings("0.18.0", {"VLLM_MXFP4_USE_MARLIN": "1"}, flag, scheme="mxfp4")
    assert [finding.problem for finding in findings] == ["ignored"]
    assert only_finding("0.19.0", "", "vllm serve m --moe-backend marlin", scheme="mxfp4") is None
    refused = only_finding("0.33.0", "", "vllm serve m --moe-backend triton", scheme="nvfp4")
    assert (refused.problem, refused.stops) == ("invalid", True)


def test_the_installed_flashinfer_is_preferred_to_the_pinned_one() -> None:
    environ = {"FLASHINFER_AUTOTUNE_DIR": "/tmp/x"}
    assert check_settings("0.17.1", environ)[0].problem == "not_yet"
    assert check_settings("0.17.1", environ, flashinfer="0.7.2.post1") == ()
    # Text that is not a version is not treated as the oldest release.
    assert check_settings("0.17.1", environ, flashinfer="no version") == ()


def test_every_pinned_flashinfer_is_in_its_table() -> None:
    known = set(tables.load_flashinfer_variables().releases)
    assert {each.flashinfer for each in load_releases().values()} <= known


def test_every_row_has_its_source() -> None:
    for settings in (load_vllm_variables(), load_vllm_flags(), tables.load_flashinfer_variables()):
        for spans in settings.rows.values():
            assert all(re.match(r"(vllm|flashinfer)/\S+", span.source) for span in spans)
            for before, after in itertools.pairwise(spans):
                assert settings.releases.index(before.last) < settings.releases.index(after.first)


@given(
    st.sampled_from(RELEASES),
    st.dictionaries(
        st.one_of(
            st.sampled_from(sorted(load_vllm_variables().rows)),
            st.from_regex(r"(VLLM|FLASHINFER)_\w*", fullmatch=True),
        ),
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
        max_size=4,
    ),
    st.lists(st.one_of(st.sampled_from(sorted(load_vllm_flags().rows)), st.text(max_size=12)), max_size=5),
    st.sampled_from([None, *SCHEMES]),
)
def test_any_settings_are_checked_without_an_exception(release, environ, command, scheme):
    found = check_settings(release, environ, command, scheme=scheme)
    effects = [finding.takes_effect for finding in found]
    assert effects == sorted(effects)
    for finding in found:
        assert finding.message
        assert finding.setting.partition("=")[0] in environ or finding.setting.startswith(("-", "vllm"))


def test_a_new_default_is_one_by_the_table_of_its_release() -> None:
    """But for those of a model, which the code that `source` names decides, and of flags."""
    releases, classes = [*load_releases()], load_data("causes.yaml")["classes"]
    for row in tables.load_replacements()["defaults"]:
        name, _, value = row["back"].partition("=")
        assert {*row["kinds"]} <= {*classes}
        if value and not {"models", "unless"} & row.keys() and name != "VLLM_MOE_SKIP_PADDING":
            place = releases.index(row["since"])
            old, new = (load_vllm_variables().list_at(releases[at])[name] for at in (place - 1, place))
            assert old.default in ("", str(bool(int(value))))
            assert new.default == str(not int(value))
