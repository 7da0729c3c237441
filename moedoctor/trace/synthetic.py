"""A synthetic routing trace: experts drawn by Zipf's law, whose popularity drifts.

It takes the place of a recorded trace. Consecutive tokens are independent of each other, which
those of a language model are not: a model reuses experts from token to token, so real hit rates differ.
"""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import asdict, dataclass

from moedoctor.trace.format import RoutingTrace, TraceError

PREFIX = "zipf"
_MAX_IDS = 50_000_000


@dataclass(frozen=True)
class ZipfSettings:
    """Settings. As text: ``zipf:experts=128,top_k=8,skew=1,drift=0.1,seed=0``, each part optional."""

    experts: int = 128
    top_k: int = 8
    layers: int = 4
    rows: int = 2048
    """Tokens, over all streams."""
    streams: int = 8
    """Sequences; tokens of one come after another."""
    skew: float = 1.0
    """The expert of rank r is drawn with weight 1 / r**skew."""
    drift: float = 0.1
    """Expected swaps of two ranks a token and layer: 0 keeps the popularity as it is."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "layers", "rows", "streams"):
            if getattr(self, name) < 1:
                raise TraceError(f"{PREFIX}: {name} is {getattr(self, name)}, expected at least 1")
        if self.top_k > self.experts or self.streams > self.rows:
            raise TraceError(f"{PREFIX}: expected top_k up to experts and streams up to rows")
        if not (0 <= self.skew <= 10 and 0 <= self.drift <= 100):
            raise TraceError(f"{PREFIX}: expected skew from 0 to 10 and drift from 0 to 100")
        if self.rows * self.layers * self.experts > _MAX_IDS:
            raise TraceError(f"{PREFIX}: rows x layers x experts is above {_MAX_IDS}, expected fewer rows")

    @classmethod
    def parse(cls, text: str) -> ZipfSettings:
        """Read ``zipf`` or ``zipf:KEY=VALUE,...``. Raises TraceError."""
        _, _, rest = text.partition(":")
        known = asdict(cls())
        given: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or key not in known:
                raise TraceError(f"{PREFIX}: '{part[:40]}' is none of {', '.join(known)} with a value")
            try:
                given[key] = type(known[key])(value)
            except ValueError:
                raise TraceError(f"{PREFIX}: {key} is '{value[:40]}', expected a number") from None
        return cls(**given)  # type: ignore[arg-type]


def draw_zipf_trace(settings: ZipfSettings) -> RoutingTrace:
    """Return the trace of `settings`: the same settings give the same trace on every machine."""
    random_ = random.Random(settings.seed)
    weights = [-settings.skew * math.log(rank + 1) for rank in range(settings.experts)]
    by_rank = [random_.sample(range(settings.experts), settings.experts) for _ in range(settings.layers)]
    ids, whole = array("i"), int(settings.drift)
    for _ in range(settings.rows):
        for order in by_rank:
            # `drift` swaps on average
            for _ in range(whole + (random_.random() < settings.drift - whole)):
                a, b = random_.randrange(settings.experts), random_.randrange(settings.experts)
                order[a], order[b] = order[b], order[a]
            ids.extend(_draw(random_, weights, order, settings.top_k))
    base, longer = divmod(settings.rows, settings.streams)
    return RoutingTrace(
        topk_ids=ids,
        num_experts=settings.experts,
        top_k=settings.top_k,
        layers=tuple(f"layer {index}" for index in range(settings.layers)),
        call_rows=(1,) * settings.rows,
        stream_rows=tuple(base + (index < longer) for index in range(settings.streams)),
        model="synthetic: Zipf with drift",
        made=asdict(settings),
    )


def _draw(random_: random.Random, weights: list[float], order: list[int], count: int) -> list[int]:
    """Return `count` distinct experts: those of the greatest log weight plus Gumbel noise."""
    noisy = [weight - math.log(-math.log(random_.random() or 1e-300)) for weight in weights]
    ranks = sorted(range(len(weights)), key=noisy.__getitem__, reverse=True)[:count]
    return [order[rank] for rank in ranks]
