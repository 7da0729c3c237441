"""The fix `expert_cache` on fakes of vLLM's layers: replaced parts, results and refusals."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from moedoctor.fixes.eviction import ONLINE_POLICIES
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.plugin import expert_cache_fix as fix
from moedoctor.plugin import expert_cache_layer, expert_cache_options, hits_first, weight_reload
from moedoctor.plugin.expert_cache_fix import check_layer, check_setting
from moedoctor.plugin.expert_cache_layer import EXPERTS, find_expert_tensors, find_host_experts
from moedoctor.plugin.expert_cache_options import CacheOptions
from moedoctor.plugin.register import FixError, OptionError
from moedoctor.reference.moe import MoeWeights, forward

E, HIDDEN, INTERMEDIATE, TOP_K = 12, 8, 6, 2


@pytest.fixture(autouse=True)
def asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDOCTOR_FIXES", "expert_cache")
    monkeypatch.setattr(fix, "_left_out", [])


@dataclass
class Description:
    scale: Any = None
    alpha_or_gscale: Any = None
    zp: Any = None
    bias: Any = None


@dataclass
class QuantConfig:
    _a1: Description = field(default_factory=Description)
    _a2: Description = field(default_factory=Description)
    _w1: Description = field(default_factory=Description)
    _w2: Description = field(default_factory=Description)


class TritonExperts:
    def __init__(self, quant_config: QuantConfig) -> None:
        self.quant_config = quant_config


class Kernel:
    """Computes like vLLM's kernels: maps ids, runs the local experts, writes into a shared workspace."""

    is_monolithic = owns_shared_experts = False

    def __init__(self, quant_config: QuantConfig) -> None:
        self.fused_experts = TritonExperts(quant_config)
        self.impl = SimpleNamespace(inplace=True)
        self.workspace: torch.Tensor | None = None
        self.tiles: list[int | None] = []

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.tiles.append(EXPERTS.get())
        assert int(topk_ids.min()) >= 0, "kernels take no -1"
        assert int(topk_ids.max()) < global_num_experts == E
        local = topk_ids if expert_map is None else expert_map[topk_ids.long()].to(topk_ids.dtype)
        described = self.fused_experts.quant_config
        weights = {"w13": w1, "w2": w2, "w13_scale": described._w1.scale, "w2_bias": described._w2.bias}
        result = forward(hidden_states, MoeWeights.from_tensors(weights), topk_weights, local)
        if self.impl.inplace:
            self.workspace = hidden_states
        elif self.workspace is None or self.workspace.shape != result.shape:
            self.workspace = torch.empty_like(hidden_states)
        return self.workspace.copy_(result)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=draw), requires_grad=False)

        self.w13_weight = parameter(E, 2 * INTERMEDIATE, HIDDEN)
        self.w2_weight = parameter(E, HIDDEN, INTERMEDIATE)
        self.w13_weight_scale, self.w2_bias = parameter(E), parameter(E, HIDDEN)
        w1, w2 = Description(scale=self.w13_weight_scale), Description(bias=self.w2_bias)
        described = QuantConfig(_a1=Description(scale=torch.ones(1)), _w1=w1, _w2=w2)
        self.quant_method = SimpleNamespace(moe_kernel=Kernel(described))
        parallel = SimpleNamespace(use_ep=False, ep_size=1, dp_size=1, pcp_size=1, enable_eplb=False)
        self.moe_config = SimpleNamespace(is_lora_enabled=False, moe_parallel_config=parallel)
        self.hidden_size, self.intermediate_size_per_partition = HIDDEN, INTERMEDIATE
        self.layer_name, self.local_num_experts, self.top_k = "layers.0.experts", E, TOP_K


def call(layer: Layer, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Call the kernel as vLLM's quantized methods do; the unquantized method names all arguments."""
    rest = {"activation": "silu", "global_num_experts": E, "expert_map": None, "shared_experts_input": None}
    given = x.clone(), layer.w13_weight, layer.w2_weight, topk_weights, ids
    kernel = layer.quant_method.moe_kernel
    result: torch.Tensor = kernel.apply(*given, apply_router_weight_on_input=False, **rest)
    return result.clone()


def draw_call(tokens: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x [T, H], topk_ids [T, K], topk_weights [T, K])."""
    x = torch.randn(tokens, HIDDEN, generator=draw)
    ids = torch.randint(0, E, (tokens, TOP_K), generator=draw, dtype=torch.int32)
    return x, ids, torch.rand(tokens, TOP_K, generator=draw)


def assert_same_outputs(layer: Layer, tokens: int, calls: int) -> None:
    """Compare random calls with those of a layer without a cache."""
    plain, draw = Layer(), torch.Generator().manual_seed(tokens)
    for _ in range(calls):
        given = draw_call(tokens, draw)
        assert torch.allclose(call(layer, *given), call(plain, *given), atol=1e-5)


def install(layer: Layer, *options: Any) -> ExpertCache:
    """Give the layer a cache on the CPU, of five slots unless `options` say something else."""
    device = torch.device("cpu")
    return expert_cache_layer.install(layer, CacheOptions(*options or (5,)), device, captured=False)


def give_caches(layers: Iterable[Layer], *, captured: bool = False, **options: Any) -> torch.nn.ModuleList:
    """Return a model of the layers, after it got caches of five slots unless `options` say something else."""
    model = torch.nn.ModuleList(layers)
    fix._give_caches(model, CacheOptions(**{"slots": 5, **options}), Layer, "cpu", captured)
    return model


def test_nothing_keeps_the_experts_on_the_device() -> None:
    layer = Layer()
    assert set(find_expert_tensors(layer)) == {"w1", "w2", "_w1.scale", "_w2.bias"}
    cache = install(layer)
    described = layer.quant_method.moe_kernel.fused_experts.quant_config
    for name, *tensors in (
        ("w1", layer.w13_weight),
        ("w2", layer.w2_weight),
        ("_w1.scale", layer.w13_weight_scale, described._w1.scale),
        ("_w2.bias", layer.w2_bias, described._w2.bias),
    ):
        assert {tensor.data_ptr() for tensor in tensors} == {cache.weights[name].data_ptr()}
        assert {len(tensor) for tensor in tensors} == {5}
    assert described._a1.scale.shape == (1,)


def test_a_layer_computes_the_same_with_caches_of_every_size() -> None:
    layer = Layer()
    install(layer)
    (experts,) = find_host_experts(torch.nn.ModuleList([layer]))
    for slots in (5, 2, 7, E, 3):
        cache = experts.give(CacheOptions(slots), captured=False)
        assert layer.w13_weight.shape[0] == slots
        assert cache.engine == ("resident" if slots == E else "host")
        for tokens in (1, 2, 9):
            assert_same_outputs(layer, tokens, calls=5)
        assert cache.stats.calls == (0 if slots == E else 15)
    assert set(layer.quant_method.moe_kernel.tiles) == {E}, "tiles as without a cache"
    assert EXPERTS.get() is None


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
def test_a_full_cache_begins_with_experts_that_leave_first(policy: str) -> None:
    layer = Layer()
    cache = install(layer, 5, policy)
    assert cache.resident() == [0, 1, 2, 3, 4]
    for name, held in cache.weights.items():
        assert torch.equal(held, find_host_experts(layer)[0].store.tensors[name][:5])
    for ids in ([7, 8], [9, 10], [11, 7]):
        cache.acquire(torch.tensor([ids], dtype=torch.int32))
    assert set(cache.resident()) == {7, 8, 9, 10, 11}, "no expert that a call asked for has left"
    (experts,) = find_host_experts(layer)
    assert experts.give(CacheOptions(5, fill=False), captured=False).resident() == [-1] * 5


class SummingExperts(TritonExperts):
    """Adds up the rows of a token's experts as vLLM's TRITON does."""

    def moe_sum(self, rows: torch.Tensor, output: torch.Tensor, *ids_and_map: Any) -> None:
        output.copy_(rows.sum(1))


@pytest.mark.parametrize("seed", range(4))
def test_two_calls_of_the_backend_give_the_bits_of_one(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 8, HIDDEN, generator=draw).bfloat16()  # [T, K, H]
    hits = torch.rand(3, 8, generator=draw) < 0.5  # [T, K]
    ids = torch.arange(24).view(3, 8)  # [T, K]
    experts, workspace = SummingExperts(QuantConfig()), torch.empty_like(rows)

    def compute(topk_ids: torch.Tensor) -> torch.Tensor:
        """Write zeros for -1, each time into the same workspace."""
        workspace.copy_(torch.where(topk_ids[..., None] >= 0, rows, 0))
        output = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        experts.moe_sum(workspace, output)
        return output

    expected = compute(ids)
    parts = [SimpleNamespace(slot_ids=torch.where(part, ids, -1)) for part in (hits, ~hits)]
    cache = SimpleNamespace(groups=lambda ids, overlap: parts)
    result = hits_first.compute_in_two(cache, experts, compute, ids, {})  # type: ignore[arg-type]
    assert torch.equal(result, expected)
    assert "moe_sum" not in vars(experts), "the backend's own sum is back"


@pytest.mark.parametrize(
    ("compute", "error"), [(lambda topk_ids: topk_ids, "set overlap=0"), (lambda topk_ids: {}["no"], "no")]
)
def test_an_error_leaves_the_backends_sum(compute: Any, error: str) -> None:
    experts, ids = SummingExperts(QuantConfig()), torch.zeros(1, 2)
    cache: Any = SimpleNamespace(groups=lambda ids, overlap: [SimpleNamespace(slot_ids=ids)])
    with pytest.raises((RuntimeError, KeyError), match=error):
        hits_first.compute_in_two(cache, experts, compute, ids, {})
    assert "moe_sum" not in vars(experts)


@pytest.mark.parametrize(
    ("slots", "tokens", "splits"),
    [(5, 1, True), (5, 2, False), (TOP_K, 2, False)],
    ids=["few ids", "the backend sorts them", "they need groups"],
)
def test_only_a_call_whose_ids_are_not_sorted_is_split(slots, tokens, splits, monkeypatch):
    layer, split = Layer(), MagicMock(return_value=torch.zeros(tokens, HIDDEN))
    kernel = layer.quant_method.moe_kernel
    install(layer, slots)
    (experts,) = find_host_experts(layer)
    kernel.apply = expert_cache_layer._apply_through(experts, type(kernel).apply.__get__(kernel), True)
    monkeypatch.setattr(hits_first, "compute_in_two", split)
    call(layer, *draw_call(tokens, torch.Generator().manual_seed(0)))
    assert split.called is splits


def summing(**described: Any) -> Layer:
    """A layer of bfloat16 whose backend adds up rows, with another description of its inputs."""
    layer, quant_config = Layer(), QuantConfig()
    layer.quant_method.moe_kernel.fused_experts = SummingExperts(quant_config)
    layer.w13_weight.data = layer.w13_weight.data.bfloat16()
    for name, value in {"block_shape": None, "per_act_token_quant": False, **described}.items():
        setattr(quant_config, name, value)
    return layer


@pytest.mark.parametrize(
    ("fp8", "described", "splits"),
    [
        (False, {}, True),
        (True, {"block_shape": [128, 128]}, True),
        (True, {"per_act_token_quant": True}, True),
        (True, {"_a2": Description(scale=torch.ones(1))}, True),
        (True, {}, False),
    ],
)
def test_only_a_backend_whose_rows_are_independent_is_split(fp8, described, splits, monkeypatch):
    layer = summing(**described)
    assert not hits_first.can_split(layer), "SummingExperts is not TRITON"
    monkeypatch.setattr(hits_first, "TRITON", "SummingExperts")
    if fp8:
        layer.w13_weight.data = layer.w13_weight.data.to(torch.float8_e4m3fn)
    assert hits_first.can_split(layer) is splits


def test_long_calls_pass_through_two_buffers_and_seed_the_slots() -> None:
    model = give_caches((Layer() for _ in range(3)), stream=3)
    plain, draw = Layer(), torch.Generator().manual_seed(0)
    described = plain.quant_method.moe_kernel.fused_experts.quant_config._w1.scale
    for tokens in (9, 2, 3):
        before = [layer.cache.stats.calls for layer in find_host_experts(model)]
        for layer in model:
            x, ids, topk_weights = draw_call(tokens, draw)
            result, expected = (call(module, x, ids, topk_weights) for module in (layer, plain))
            torch.testing.assert_close(result, expected, rtol=0, atol=0 if tokens > 2 else 1e-5)
            config = layer.quant_method.moe_kernel.fused_experts.quant_config
            assert len(config._w1.scale) == 5, "the slots are back"
            (experts,) = find_host_experts(layer)
            assert set(ids[-1].tolist()) <= set(experts.cache.resident())
        calls = [layer.cache.stats.calls for layer in find_host_experts(model)]
        assert calls == [count + (tokens < 3) for count in before], "a streamed call is no call of the cache"
    assert len(described) == E


@pytest.mark.parametrize(
    ("layers", "options", "tokens"),
    [
        (8, {}, E),  # 2 * E / K
        (8, {"slots": 11}, E),
        (7, {}, None),  # two buffers are more than a quarter
        (2, {"stream": 1}, 3),  # fewer always fit
        (8, {"stream": 0}, None),
    ],
)
def test_prompts_stream_from_a_length_on(layers: int, options: dict[str, int], tokens: int | None) -> None:
    model = give_caches((Layer() for _ in range(layers)), **options)
    assert {experts.stream and experts.stream[2] for experts in find_host_experts(model)} == {tokens}


def changed(path: str = "top_k", value: Any = TOP_K) -> Layer:
    """A layer with another attribute."""
    layer = Layer()
    owner, _, name = path.rpartition(".")
    setattr(operator.attrgetter(owner)(layer) if owner else layer, name, value)
    return layer


CUTLASS = type("CutlassExperts", (TritonExperts,), {})(QuantConfig())
KERNEL = "quant_method.moe_kernel"
ACT_ORDER = f"{KERNEL}.fused_experts.w2_g_idx"


@pytest.mark.parametrize(
    ("layer", "capacity", "reason"),
    [
        (changed("moe_config.moe_parallel_config.ep_size", 2), 5, "spread over several GPUs"),
        (changed("moe_config.moe_parallel_config.pcp_size", 2), 5, "spread over several GPUs"),
        (changed(), 1, "1 slots hold fewer experts than one token needs"),
        (changed("moe_config.is_lora_enabled", True), 5, "LoRA"),
        (changed(ACT_ORDER, torch.zeros(E, 4)), 5, "act-order"),
        (changed(ACT_ORDER, torch.zeros(E, 0)), 5, None),
        (changed("moe_config.moe_parallel_config.enable_eplb", True), 5, "load balancing"),
        (changed(f"{KERNEL}.is_monolithic", True), 5, "routes and computes in one kernel"),
        (changed(KERNEL, None), 5, "routes and computes in one kernel"),
        (changed(f"{KERNEL}.owns_shared_experts", True), 5, "shared experts"),
        (changed(f"{KERNEL}.fused_experts", CUTLASS), 5, "computes with CutlassExperts"),
        (changed(), 2, None),
    ],
)
def test_unsupported_layers_are_refused_with_the_reason(layer, capacity, reason):
    answer = check_layer(layer, capacity)
    assert answer is None if reason is None else reason in str(answer)


def test_settings_are_refused_before_anything_is_loaded() -> None:
    made = []
    create = fix._create_on_host(lambda self, layer, **given: made.append(layer), slots=1)
    with pytest.raises(SystemExit, match=r"=1: layers\.0\.experts cannot have .* one token needs"):
        create(None, layer=Layer(), num_experts=E)
    assert made == []
    assert check_setting(Layer(), TOP_K) is None


def engine(cpu: float = 0.0, group: int = 0, graphs: str = "FULL", eager: bool = False) -> SimpleNamespace:
    """The parts of a `VllmConfig` that are read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        device_config=SimpleNamespace(device="cpu"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=graphs)),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=cpu), prefetch=SimpleNamespace(offload_group_size=group)
        ),
    )


@pytest.mark.parametrize("config", [engine(cpu=1.0), engine(group=4)])
def test_offload_and_a_cache_exclude_each_other(config: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="weights are offloaded"):
        load(Layer(), config=config)


def load(
    *layers: torch.nn.Module, slots: int = 5, rows: Any = None, config: Any = None, own: Any = None
) -> Any:
    """Return a model of the layers after a loader loaded it; `own` is the model's config if it is a draft."""
    options = {"wish": CacheOptions(slots), "layer_type": Layer, "rows": rows or fix.RealRows()}
    config = config or engine(graphs="NONE")
    load_model = fix._wrap_load_model(lambda *arguments: torch.nn.ModuleList(layers), **options)
    return load_model(None, config, own or config.model_config)


def test_a_loaded_model_gets_caches_once() -> None:
    layer = load(Layer())[0]
    (experts,) = find_host_experts(layer)
    assert load(layer)[0].w13_weight.shape[0] == 5
    assert find_host_experts(layer) == [experts]


def test_padding_of_a_step_loads_nothing() -> None:
    """Calls before, between and after steps have other rows; all caches read the same number."""
    rows = fix.RealRows()
    rows.begin(1, 4)  # no model is loaded yet
    rows.end(None)
    model = load(Layer(), Layer(), slots=6, rows=rows)
    layers = find_host_experts(model)
    ids = torch.arange(8, dtype=torch.int32).view(4, TOP_K)  # [T, K]
    x, topk_weights = torch.randn(4, HIDDEN), torch.rand(4, TOP_K)

    def computes() -> int:
        layers[1].give(CacheOptions(8, fill=False), captured=False)
        out = call(model[1], x, ids, topk_weights)
        assert torch.allclose(out[:3], call(Layer(), x, ids, topk_weights)[:3], atol=1e-5)
        return layers[1].cache.stats.misses

    assert computes() == 8
    rows.begin(3, 4)
    assert computes() == 6
    rows.end(None)
    assert computes() == 8
    rows.begin(4, 4)
    assert computes() == 8
    assert layers[0].cache.stats.calls == 0


@pytest.mark.parametrize(("slots", "held"), [(5, {"expert_cache"}), (E, set())])
def test_new_weights_are_refused_if_a_layer_has_a_cache(slots, held):
    model = load(Layer(), slots=slots)
    assert set(weight_reload._HOLDERS.values()) == held, model


def test_graphs_are_captured_unless_they_are_off() -> None:
    configs = engine(), engine(graphs="PIECEWISE"), engine(graphs="NONE"), engine(eager=True)
    captured = [fix._is_captured(config, config.model_config) for config in configs]
    assert captured == [True, True, False, False]


def test_only_a_draft_model_needs_no_experts() -> None:
    dense = torch.nn.Linear(2, 2)
    assert load(dense, own=SimpleNamespace(enforce_eager=True))[0] is dense
    with pytest.raises(SystemExit, match="the model has no MoE layer"):
        load(dense)


def test_an_optional_cache_is_left_out_of_every_layer(monkeypatch, caplog):
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    unsupported = changed("moe_config.moe_parallel_config.enable_eplb", True)
    for model, captured in (([Layer(), unsupported], False), ([Layer(), Layer()], True)):
        monkeypatch.setattr(fix, "_left_out", [])
        layers = give_caches(model, captured=captured)
        assert [layer.w13_weight.shape[0] for layer in layers] == [E, E]
        assert not find_host_experts(layers)
    assert "left out: expert_cache: MOEDOCTOR_EXPERT_CACHE=5: 1 cannot have" in caplog.text
    assert "left out: expert_cache: MOEDOCTOR_EXPERT_CACHE=5: CUDA graphs need pinned" in caplog.text


def test_the_variable_is_read() -> None:
    assert fix.read_wish({}) is None
    usual = CacheOptions(16, policy="aging", packed=True, overlap=True, fill=True)
    assert fix.read_wish({fix.VARIABLE: " 16 "}) == usual
    every = (
        "8: policy=lfru, packed=0,overlap=0,fill=0,engine=host,pin=0,stream=64,cpu=0.4,workers=9,nodes=0+1"
    )
    expected = CacheOptions(8, "lfru", False, False, False, "host", False, 64, 0.4, 9, (0, 1))
    assert fix.read_wish({fix.VARIABLE: "8:cpu=auto"}) == CacheOptions(8, cpu=None)
    assert fix.read_wish({fix.VARIABLE: every}) == expected
    for default in ("1", "backend"):
        assert fix.read_wish({fix.VARIABLE: f"8:overlap={default}"}) == CacheOptions(8)


BAD_SLOTS = ("0", "-4", "many", "1.5", ":packed=1", "9" * 5000)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        *((value, "expected a number of slots, at least 1") for value in BAD_SLOTS),
        ("8:policy=best", "has policy='best'; expected aging, lfru, lfu, lru"),
        ("8:packed=yes", "has packed='yes'; expected 0 or 1"),
        ("8:overlap=own", "has overlap='own'; expected 0 or 1"),
        ("8:slots=4", "expected policy, packed, overlap, fill, engine, pin, stream, cpu, workers, nodes"),
        ("8:stream=-1", "has stream='-1'; expected a number of tokens"),
        *((f"8:cpu={value}", "expected auto, or a share from 0 to 1") for value in ("2", "-1", "1e0", "")),
        ("8:nodes=0-1", "expected numbers of NUMA nodes"),
        ("8:packed=1,packed=0", "has the option packed twice"),
        ("8:policy=\x1b[31m\n" + "x" * 4000, "expected aging"),
    ],
)
def test_a_bad_value_is_one_line(value: str, line: str) -> None:
    with pytest.raises(OptionError) as refused:
        fix.read_wish({fix.VARIABLE: value})
    text = str(refused.value)
    assert line in text
    assert text.startswith(fix.VARIABLE)
    assert len(text) < 400
    assert text.isprintable()


def test_policies_are_those_of_the_cache() -> None:
    assert set(expert_cache_options.POLICIES) == set(ONLINE_POLICIES)


def test_without_a_number_of_slots_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fix.VARIABLE, raising=False)
    with pytest.raises(FixError, match="MOEDOCTOR_EXPERT_CACHE is not set; expected the number"):
        fix.apply("0.21.0")


def test_tiles_and_sorting_are_those_for_all_experts() -> None:
    sort = fix._keep_assignment(lambda ids, config, tokens, top_k, experts, mapping: experts)
    tile = fix._keep_tiles(lambda w1_shape, w2_shape, top_k: (w1_shape, w2_shape, top_k))
    assert sort("ids", {}, 1, 8, 16, None) == 16
    assert tile((4, 6, 8), (4, 8, 3), 2) == ((4, 6, 8), (4, 8, 3), 2)
    with expert_cache_layer._choose_tiles_for(E):
        assert sort("ids", {}, 1, 8, 16, None) == E
        assert tile((4, 6, 8), (4, 8, 3), 2) == ((E, 6, 8), (E, 8, 3), 2)


@dataclass(frozen=True)
class HummingConfig:
    num_experts: int


class HummingIndexedExperts(TritonExperts):
    """Refuses weights of another number of experts than it was told, as HUMMING does."""

    humming_configs = {name: HummingConfig(E) for name in ("w13", "w2")}  # noqa: RUF012


def test_humming_is_told_how_many_experts_there_are() -> None:
    layer, counts = Layer(), []
    kernel = layer.quant_method.moe_kernel
    kernel.fused_experts = experts = HummingIndexedExperts(kernel.fused_experts.quant_config)
    compute = kernel.apply

    def apply(w1: torch.Tensor, **given: Any) -> torch.Tensor:
        sizes = {config.num_experts for config in experts.humming_configs.values()}
        assert sizes == {len(w1)}
        counts.append(len(w1))
        result: torch.Tensor = compute(w1=w1, **given)
        return result

    kernel.apply = apply
    assert check_layer(layer, 5) is None
    give_caches([layer], stream=9)
    for tokens in (2, 9, 1):
        assert_same_outputs(layer, tokens, calls=1)
    assert counts == [5, E, 5]
    del HummingIndexedExperts.humming_configs, experts.humming_configs
    assert "before vLLM 0.30.0" in str(check_layer(layer, 5))
