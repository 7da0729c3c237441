"""In which order the engine ``device`` asks for its work, and who waits for whom; streams are stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache

pytest.importorskip("triton", reason="needs Triton: pip install triton")


class Streams:
    """Two streams; `log` is what was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"

    def wait_stream(self, other: str) -> None:
        self.log.append(f"copies wait for {other}")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.current = "copies"
        yield
        self.current = "main"

    def event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.current} waits for {event.after}")


class Event:
    """Remembers what it was recorded after."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.after = ""

    def record(self) -> None:
        self.after = self._streams.log[-1]


class Main:
    """The stream that computes."""

    def __init__(self, streams: Streams) -> None:
        self.wait_event = streams.wait_event

    def __str__(self) -> str:
        return "main"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    module = "moedoctor.fixes.expert_cache_device"

    def logs(what: str) -> Any:
        return lambda *_, **__: found.log.append(f"{what} on {found.current}")

    monkeypatch.setattr(f"{module}.interprets", lambda: True)
    monkeypatch.setattr(f"{module}.launch_lookup", logs("lookup"))
    monkeypatch.setattr(f"{module}.launch_groups", logs("groups"))
    monkeypatch.setattr(f"{module}.Transfer.launch", logs("copy"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: found if found.current == "copies" else Main(found)
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: found.inside())
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


@pytest.fixture
def cache(streams: Streams) -> ExpertCache:
    found = ExpertCache({"w": torch.zeros(8, 4)}, 4, engine="device", device="cpu")
    found._engine._copies = streams  # type: ignore[attr-defined]
    return found


IDS = torch.zeros(1, 2, dtype=torch.int32)
COPIED = ["lookup on main", "copies wait for main", "copy on copies"]
WAITED = "main waits for copy on copies"


def test_copies_beside_hits_begin_after_the_lookup_and_end_before_the_misses(
    cache: ExpertCache, streams: Streams
) -> None:
    for part, _ in zip(("hits", "misses"), cache.groups(IDS, overlap=True), strict=False):
        streams.log.append(part)
    assert streams.log == [*COPIED, "hits", WAITED, "misses"]
    streams.log.clear()
    cache.acquire(IDS)
    assert streams.log == ["lookup on main", "copy on main"]


@pytest.mark.parametrize("next_call", ["acquire", "prefetch", "overlap", "groups", "seed"])
def test_whatever_comes_after_a_broken_off_call_waits_for_its_copies(
    cache: ExpertCache, streams: Streams, next_call: str
) -> None:
    next(iter(cache.groups(IDS, overlap=True)))
    assert streams.log == COPIED
    streams.log.clear()
    many = torch.zeros(3, 2, dtype=torch.int32)
    {
        "acquire": lambda: cache.acquire(IDS),
        "prefetch": lambda: cache.prefetch(IDS),
        "overlap": lambda: list(cache.groups(IDS, overlap=True)),
        "groups": lambda: list(cache.groups(many)),
        "seed": lambda: cache.seed(IDS),
    }[next_call]()
    assert streams.log[0] == WAITED
    assert streams.log.count(WAITED) == (2 if next_call == "overlap" else 1)
