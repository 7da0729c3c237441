"""The fix `offload` inside stubs that are shaped like the supported releases."""

import importlib
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.version import Version
from torch import nn
from vllm_stub import write, write_files

from moedoctor.fixes.offload import storage as offload_storage
from moedoctor.plugin import offload_fix
from tests.real_vllm import ask_child

BASE = """
class BaseOffloader:
    def post_init(self):
        return


instance = BaseOffloader()


def get_offloader():
    return instance
"""
UVA = """
from torch.func import functional_call

from vllm.model_executor.offloader.base import BaseOffloader


class UVAOffloader(BaseOffloader):
    def __init__(self, budget, params=None, uva=False):
        self.budget, self.cpu_offload_bytes, self.params = budget, 0, params or ()
        self.pin_memory, self.uva_offloading = False, uva

    def _maybe_offload_to_cpu(self, module{prefix}):
        moved = False
        for name, p in module.named_parameters():
            if self.cpu_offload_bytes < self.budget:
                p.data = p.data.to(device="cpu").clone()
                self.cpu_offload_bytes += p.nbytes
                moved = True
        if not self.uva_offloading and moved:
            original = module.forward

            def forward(*args, **kwargs):
                module.forward = original
                state = {k: v for k, v in module.state_dict().items()}
                output = functional_call(module, state, args=args, kwargs=kwargs)
                module.forward = forward
                return output

            module.forward = forward
        return module
"""
ARGUMENTS = """
import types


class EngineArgs:
    additional_config = None

    def __init__(self, cpu_offload_gb=0.0, enforce_eager=False, **options):
        self.cpu_offload_gb, self.enforce_eager = cpu_offload_gb, enforce_eager
        self.compilation_config = types.SimpleNamespace(cudagraph_mode="full")
        vars(self).update(options)

    def create_engine_config(self, usage_context=None, headless=False):
        return make(additional_config=self.additional_config, graphs=self.compilation_config.cudagraph_mode)


def make(**options):
    return types.SimpleNamespace(**options)
"""
RUNNER = """
class GPUModelRunner:
    offload_config = None

    def may_reinitialize_input_batch(self, kv_cache_config, kernel_block_sizes):
        {check}
        self.made = kernel_block_sizes
"""
WORKER = """
class Worker:
    def __init__(self, runner):
        self.model_runner, self.asked = runner, []

    def load_model(self):
        self.model_runner.load_model()

    def reload_weights(self, *args, **kwargs):
        self.model_runner.reload_weights(*args, **kwargs)
{transfer}
    def update_weights(self, update_info):
        self.asked.append(update_info)

    def sleep(self, level: int = 1):
        self.asked.append(level)
"""
TRANSFER = """
    def _check_weight_transfer_engine(self):
        self.asked.append("transfer")
"""
ASSERTION = "assert self.offload_config.uva.cpu_offload_gb == 0, 'refused'"
LOADING = """
from contextlib import contextmanager


@contextmanager
def device_loading_context(module, target_device):
    yield getattr(module, "_vllm_is_uva_offloaded", module)
"""
VERSION = "0.21.0"


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Install a fake vllm of this release."""
    root = write(tmp_path, version)
    old, prefixed = Version(version) < Version("0.20.0"), Version(version) >= Version("0.29.0")
    files = {
        "model_executor/offloader/base.py": BASE,
        "model_executor/offloader/uva.py": UVA.replace("{prefix}", ', prefix=""' if prefixed else ""),
        "model_executor/model_loader/utils.py": LOADING,
        "engine/arg_utils.py": ARGUMENTS,
        "v1/worker/gpu_model_runner.py": RUNNER.replace("{check}", ASSERTION if old else "pass"),
        "v1/worker/gpu_worker.py": WORKER.replace("{transfer}", TRANSFER if version >= "0.21.0" else ""),
        "utils/platform_utils.py": "def is_uva_available():\n    return True\n",
        "config/__init__.py": "class CUDAGraphMode:\n    NONE = 'none'\n",
        "envs.py": "import os\n\n\ndef __getattr__(name):\n    return int(os.environ.get(name, '0'))\n",
    }
    write_files(root, {f"vllm/{name}": text for name, text in files.items()})
    monkeypatch.syspath_prepend(str(root))


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of 0.21.0 with the fix."""
    stub(tmp_path, monkeypatch, VERSION)
    offload_fix.apply(VERSION)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(160, 160), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.rand(160), requires_grad=False)
        self.config = types.SimpleNamespace(scale=self.weight_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight * self.config.scale)


def wrapped(budget: int, *, uva: bool = False, layers: int = 3) -> tuple[list[nn.Module], Any]:
    offloader = importlib.import_module("vllm.model_executor.offloader.uva").UVAOffloader(budget, uva=uva)
    return [offloader._maybe_offload_to_cpu(Layer()) for _ in range(layers)], offloader


@pytest.mark.parametrize("version", ["0.19.1", VERSION, "0.29.0", "0.33.0"])
def test_every_release_is_patched_and_computes_the_same(tmp_path, monkeypatch, caplog, version):
    stub(tmp_path, monkeypatch, version)
    active = offload_fix.apply(version)
    assert ("rebuilt" in active) == (version < "0.20.0")
    assert ("back to the host" in active) == (version == "0.33.0")
    modules, offloader = wrapped(1 << 20)
    x = torch.randn(5, 160)
    with torch.no_grad():
        plain = [module(x) for module in modules]
        assert all("forward" not in vars(module) for module in modules)  # vLLM's own wrapper is off
        held = [module.weight_scale for module in modules]
        offloader.post_init()
        assert all(torch.equal(module(x), expected) for module, expected in zip(modules, plain, strict=True))
        compiled = torch.compile(nn.Sequential(*modules), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), nn.Sequential(*modules)(x))
    assert [module.weight_scale for module in modules] == held, "a config holds the module's parameters"
    assert caplog.text.count("not pinned, so copies block") == 1
    report = offloader._moedoctor_offload.report()
    assert report.host_bytes == 3 * 160 * 160 * 4
    on_host = [placement.name for placement in report.placements if placement.lives == "host"]
    assert {name.rpartition(".")[2] for name in on_host} == {"weight"}


@pytest.mark.parametrize(("budget", "uva"), [(0, False), (1 << 20, True)])
def test_nothing_is_taken_over_if_vllm_copies_nothing(patched: None, budget: int, uva: bool) -> None:
    modules, offloader = wrapped(budget, uva=uva)
    offloader.post_init()
    assert not hasattr(offloader, "_moedoctor_offload")
    assert all("forward" not in vars(module) for module in modules)


@pytest.mark.parametrize("calls", [True, False])
def test_it_takes_over_if_the_runner_leaves_out_post_init(patched: None, calls: bool) -> None:
    """As the V1 runner does with STOCK_TORCH_COMPILE, and the V2 runner of releases before 0.28.0 always."""
    base = importlib.import_module("vllm.model_executor.offloader.base")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    modules, x = [], torch.randn(5, 160)

    def load_model() -> None:
        made, base.instance = wrapped(1 << 20)
        modules.extend(made)
        if calls:
            base.instance.post_init()

    worker(types.SimpleNamespace(load_model=load_model, get_model=lambda: None)).load_model()
    assert base.instance._moedoctor_offload.report().host_bytes == 3 * 160 * 160 * 4
    assert all("forward" in vars(module) for module in modules), "each waits for its weights"
    with torch.no_grad():
        assert [tuple(module(x).shape) for module in modules] == [(5, 160)] * 3


@pytest.mark.parametrize("uva", [True, False])
def test_a_buffer_made_of_a_weight_gets_what_is_loaded(patched: None, uva: bool) -> None:
    """As `MambaMixer2` makes it; the weight gets its memory, then its numbers."""
    base = importlib.import_module("vllm.model_executor.offloader.base")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    layer = Layer()
    layer.register_buffer("rows", layer.weight.view(-1), persistent=False)
    layer.register_buffer("other", torch.zeros(7))

    def load_model() -> None:
        module = importlib.import_module("vllm.model_executor.offloader.uva")
        base.instance = offloader = module.UVAOffloader(1 << 20, uva=uva)
        offloader._maybe_offload_to_cpu(layer)
        layer.weight.data.fill_(2.0)
        layer.other.fill_(3.0)
        assert not bool((layer.rows == 2.0).any()), "the failure"

    loaded = worker(types.SimpleNamespace(load_model=load_model, get_model=lambda: None))
    loaded.load_model()
    assert bool((layer.rows == 2.0).all())
    assert bool((layer.other == 3.0).all())
    with pytest.raises(RuntimeError, match="reload_weights is refused: the fix offload"):
        loaded.reload_weights()


@pytest.mark.filterwarnings(r"ignore:.*on the host now. 0\.weight, 1\.weight, 2\.weight$:RuntimeWarning")
@pytest.mark.parametrize("reason", ["ValueError: module: 1.mask is a meta", "OutOfMemoryError: no room"])
def test_if_ours_cannot_take_over_vllm_offloads_as_before(patched, monkeypatch, caplog, reason):
    """An engine that asked for ours by name stops."""
    modules, offloader = wrapped(1 << 20)
    x = torch.randn(5, 160)
    plain = [module(x) for module in modules]
    if "meta" in reason:
        modules[1].register_buffer("mask", torch.empty(4, device="meta"))
    for name in ("make_buffers", "_bring_back"):  # neither for buffers nor for what did not fit anyway
        monkeypatch.setattr(offload_storage, name, Mock(side_effect=torch.OutOfMemoryError("no room")))
    pending = list(offloader._moedoctor_layers)
    monkeypatch.setenv("MOEDOCTOR_FIXES", "offload")
    with pytest.raises(SystemExit, match="vLLM is stopped: offload is refused: ours could not take over"):
        offloader.post_init()
    monkeypatch.delenv("MOEDOCTOR_FIXES")
    offloader._moedoctor_layers = pending
    offloader.post_init()
    assert all("forward" in vars(module) for module in modules)
    modules[1].__dict__["_buffers"].pop("mask", None)
    assert [tuple(module.weight.shape) for module in modules] == [(160, 160)] * 3
    assert all(torch.equal(module(x), expected) for module, expected in zip(modules, plain, strict=True))
    assert f"ours could not take over from vLLM: {reason}" in caplog.messages[0]


def test_an_engine_that_copies_has_no_graphs_and_its_own_cache(patched, monkeypatch):
    made = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    mapped = made(cpu_offload_gb=1.0).create_engine_config()
    assert (mapped.additional_config, mapped.graphs) == (None, "full")
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    copied = made(cpu_offload_gb=1.0, additional_config={"mine": 1}).create_engine_config()
    assert (copied.additional_config, copied.graphs) == ({"mine": 1, "moedoctor": "offload"}, "none")
    for others in ({}, {"offload_backend": "prefetch"}, {"offload_group_size": 4}):
        arguments = made(cpu_offload_gb=1.0 if others else 0.0, **others)
        assert arguments.create_engine_config().graphs == "full"
    eager = made(cpu_offload_gb=1.0, enforce_eager=True).create_engine_config()
    assert (eager.additional_config, eager.graphs) == ({"moedoctor": "offload"}, "full")


def test_the_assertion_is_lifted_before_0_20(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "0.19.1")
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner()
    runner.offload_config = config = types.SimpleNamespace(uva=types.SimpleNamespace(cpu_offload_gb=4))
    with pytest.raises(AssertionError, match="refused"):
        runner.may_reinitialize_input_batch(None, [32])
    offload_fix.apply("0.19.1")
    runner.may_reinitialize_input_batch(None, [32])
    assert runner.made == [32]
    assert runner.offload_config is config


REAL = """
import json, types
import torch
from torch import nn
from moedoctor.plugin import register as vllm_plugin

vllm_plugin.register()
vllm_plugin.register()
from vllm.model_executor.offloader import uva

uva.torch = types.SimpleNamespace(device=lambda kind: None)  # it leaves what is on a CPU alone
offloader = uva.UVAOffloader(1 << 30, {"weight"})
offloader.uva_offloading = offloader.pin_memory = False
layers = [nn.Linear(160, 160) for _ in range(3)]
x = torch.randn(5, 160)
with torch.no_grad():
    plain = [layer(x) for layer in layers]
    offloader.wrap_modules(iter(layers))
    offloader.post_init()
    same = all(torch.equal(layer(x), expected) for layer, expected in zip(layers, plain))
    compiled = torch.compile(nn.Sequential(*layers), fullgraph=True, backend="eager")(x)
    same = same and torch.equal(compiled, nn.Sequential(*layers)(x))
handle = getattr(offloader, "_moedoctor_offload", None)
print("ANSWER " + json.dumps([vllm_plugin.read_vllm_version(), same, handle and handle.report().host_bytes]))
"""


@pytest.mark.upstream
def test_the_installed_vllm_is_patched_and_computes_the_same() -> None:
    """Patches the release's own Python files in a child process; ``make test-upstream`` takes releases."""
    (version, same, host_bytes), lines = ask_child(REAL, MOEDOCTOR_FIXES="offload,routing")
    release = Version(version)
    assert same
    # From 0.29.0 on vLLM also checks whether each parameter is on a CPU.
    assert host_bytes == (3 * 160 * 160 * 4 if release < Version("0.29.0") else None)
    active = [line for line in lines if "moedoctor: active in" in line]
    assert len(active) == 1
    assert f"vLLM {version}: offload (without UVA" in active[0]
    assert ("input batch may be rebuilt" in active[0]) == (release < Version("0.20.0"))
    assert ("back to the host" in active[0]) == (release >= Version("0.33.0"))
