"""The layers of a model and their sizes: they decide its memory and the cost of a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers of one size. They keep keys and values of every token."""

    count: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Tokens that a layer looks back; None for the whole context."""
    output_gate: bool = False
    """True if the query projection also makes a gate of the output's size."""
    shared_kv: bool = False
    """True if the values are the keys: one projection, but the cache keeps both."""

    def count_kv_elements(self) -> int:
        """Return the elements that one layer keeps of one token: keys and values."""
        return 2 * self.num_kv_heads * self.head_dim

    def count_parameters(self, hidden_size: int) -> int:
        queries = self.num_heads * self.head_dim * (2 if self.output_gate else 1)
        keys_values = self.num_kv_heads * self.head_dim * (1 if self.shared_kv else 2)
        return hidden_size * (queries + keys_values + self.num_heads * self.head_dim)


@dataclass(frozen=True)
class LatentAttentionLayers:
    """Multi-head latent attention (MLA): all heads share one compressed vector a token."""

    count: int
    num_heads: int
    kv_rank: int
    """Width of the vector from which keys and values are made."""
    rope_dim: int
    """Width of the part of the key that carries the position; kept beside that vector."""
    nope_dim: int
    """Width of the rest of a head's key."""
    value_dim: int
    query_rank: int | None = None
    """Width to which queries are compressed; None if they are not."""
    sliding_window: ClassVar[None] = None

    def count_kv_elements(self) -> int:
        """Return the elements that one layer keeps of one token."""
        return self.kv_rank + self.rope_dim

    def count_parameters(self, hidden_size: int) -> int:
        queries = self.num_heads * (self.nope_dim + self.rope_dim)
        rank = self.query_rank
        query = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        down = hidden_size * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        return query + down + up + self.num_heads * self.value_dim * hidden_size


@dataclass(frozen=True)
class RecurrentLayers:
    """Layers with a state of fixed size per request instead of keys and values: Mamba 2, gated delta net."""

    count: int
    conv_elements: int
    """Elements of one layer's convolution state."""
    state_elements: int
    """Elements of one layer's recurrent state."""
    state_bytes: int
    """Bytes of one element of the recurrent state; the convolution state is in the model's own type."""
    parameters_each: int

    def count_bytes_per_request(self, model_bytes: int) -> int:
        """Return the bytes of one layer's state; an element of the model's type has `model_bytes`."""
        return self.conv_elements * model_bytes + self.state_elements * self.state_bytes


@dataclass(frozen=True)
class ExpertLayers:
    """MoE layers of one size."""

    count: int
    layer: LayerShape
    """The routed experts; their hidden size is below the model's if they work in a latent space."""
    latent_parameters: int = 0
    """Parameters of the projections into the latent space and back."""
    shared_intermediate_size: int = 0
    """Width of the shared expert, 0 without one."""

    def count_parameters_beside(self, model_hidden_size: int) -> int:
        """Return the parameters beside the routed experts of a layer: router, shared expert, projections."""
        shared = (3 if self.layer.gated else 2) * model_hidden_size * self.shared_intermediate_size
        return model_hidden_size * self.layer.experts + shared + self.latent_parameters


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory and traffic. Norms and biases are left out: below 0.1 %."""

    name: str
    source: str
    """The origin of the figures."""
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    num_layers: int
    attention: tuple[AttentionLayers | LatentAttentionLayers, ...]
    recurrent: RecurrentLayers | None
    experts: ExpertLayers
    dense_parameters: int = 0
    """Parameters of dense MLPs, all layers together."""
    max_context: int | None = None

    def divide(self, gpus: int) -> ModelShape:
        """Return what each of `gpus` GPUs holds with tensor parallelism, as vLLM divides a model.

        Heads, the width of experts and of dense layers, and the vocabulary are divided. Routers, projections
        into a latent space and the vectors of latent attention are on every GPU; so are keys and values, if
        there are fewer of their heads than GPUs. Raises ValueError if a size does not divide.
        """
        if gpus == 1:
            return self

        def divide_size(size: int, what: str) -> int:
            if size % gpus:
                raise ValueError(f"{self.name} has {what} of {size}, which {gpus} GPUs do not divide")
            return size // gpus

        attention: list[AttentionLayers | LatentAttentionLayers] = []
        for layers in self.attention:
            part = replace(layers, num_heads=divide_size(layers.num_heads, "a number of heads"))
            if isinstance(part, AttentionLayers):
                if gpus % part.num_kv_heads:
                    divide_size(part.num_kv_heads, "a number of KV heads")
                part = replace(part, num_kv_heads=max(1, part.num_kv_heads // gpus))
            attention.append(part)
        recurrent = self.recurrent and replace(
            self.recurrent,
            conv_elements=-(-self.recurrent.conv_elements // gpus),
            state_elements=-(-self.recurrent.state_elements // gpus),
            parameters_each=-(-self.recurrent.parameters_each // gpus),
        )
        layer = self.experts.layer
        experts = replace(
            self.experts,
            layer=replace(layer, intermediate=divide_size(layer.intermediate, "an intermediate size")),
            shared_intermediate_size=-(-self.experts.shared_intermediate_size // gpus),
        )
        return replace(
            self,
            vocab_size=-(-self.vocab_size // gpus),
            attention=tuple(attention),
            recurrent=recurrent,
            experts=experts,
            dense_parameters=-(-self.dense_parameters // gpus),
        )

    def count_expert_parameters(self) -> int:
        layer = self.experts.layer
        return self.experts.count * layer.experts * layer.expert_parameters

    def count_embedding_parameters(self) -> int:
        """Return the parameters of the embeddings and of lm_head, which share them if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def count_other_parameters(self) -> int:
        """Return the parameters of everything but the routed experts."""
        attention = sum(layers.count * layers.count_parameters(self.hidden_size) for layers in self.attention)
        recurrent = self.recurrent.count * self.recurrent.parameters_each if self.recurrent else 0
        beside = self.experts.count * self.experts.count_parameters_beside(self.hidden_size)
        return self.count_embedding_parameters() + attention + recurrent + beside + self.dense_parameters
