"""Trains a small MoE language model on text that is on this machine, and records what its routers choose.

    python scripts/train_trace_model.py OUT.safetensors

The text is Python's own standard library: source code, comments and documentation, in the order of the
file names. Every 20th file is held out. The trace that ships with moedoctor comes from this script with its
defaults, on one GPU; its metadata says what was trained, on which text (with a hash), how well it predicts,
and how evenly its experts are used. Runs with other releases of Python or torch give other routing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trace_model import Model, Settings

from moedoctor.trace.format import RoutingTrace, save

# T = tokens, B = sequences, S = length, V = vocabulary, K = top_k
_PIECE = re.compile(r"\w{1,16}|[^\S\n]+|\n|[^\w\s]")
_HELD_OUT = 20
"""Every file of this number is for the trace alone."""


def files_of(folder: Path, most_bytes: int) -> list[Path]:
    """The text files of the standard library in the order of their names, up to `most_bytes` in all."""
    found, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if path.is_symlink() or {"site-packages", "dist-packages", "__pycache__"} & set(parts):
            continue
        total += path.stat().st_size
        if total > most_bytes:
            break
        found.append(path)
    return found


def tokenise(texts: Sequence[str], held_out: Sequence[str], size: int) -> tuple[Tensor, Tensor]:
    """(tokens of `texts`, of `held_out`): the commonest pieces of `texts` by number, the rest as bytes."""
    counts = Counter(itertools.chain.from_iterable(map(_PIECE.findall, texts)))
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - 256]
    number = {piece: 256 + index for index, piece in enumerate(common)}

    def encode(text: str) -> Iterator[int]:
        for piece in _PIECE.findall(text):
            if piece in number:
                yield number[piece]
            else:
                yield from piece.encode("utf-8", "replace")

    return tuple(
        torch.tensor([token for text in group for token in encode(text)], dtype=torch.int32)
        for group in (texts, held_out)
    )  # type: ignore[return-value]


def train(settings: Settings, data: Tensor, device: torch.device) -> tuple[Model, dict[str, float]]:
    """A model trained on `data`, and how that went."""
    torch.manual_seed(settings.seed)
    model = Model(settings).to(device)
    decayed = [one for one in model.parameters() if one.dim() >= 2]
    rest = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    picker = torch.Generator().manual_seed(settings.seed)
    data = data.to(device)
    began, loss, step = time.perf_counter(), torch.zeros(()), 0
    window = torch.arange(settings.length + 1, device=device)
    for step in range(1, settings.steps + 1):
        spent = (time.perf_counter() - began) / settings.seconds
        done = max(spent, step / settings.steps)  # the rate reaches its end also where time ends the training
        warm = min(1.0, step / (0.05 * settings.steps + 1))
        for group in optimiser.param_groups:
            group["lr"] = (
                settings.rate * warm * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))))
            )
        starts = torch.randint(
            len(data) - settings.length - 1, (settings.batch, 1), generator=picker
        )  # [B, 1]
        batch = data[starts.to(device) + window].long()  # [B, S+1]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1])  # [B, S, V]
        loss = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        balance = torch.stack([block.moe.balance for block in model.blocks]).mean()
        optimiser.zero_grad(set_to_none=True)
        (loss + settings.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == 1:
            said = f"step {step}: loss {loss.item():.3f}, balance {balance.item():.3f}"
            print(f"{said}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if time.perf_counter() - began > settings.seconds:
            break
    seconds = time.perf_counter() - began
    return model, {
        "steps_done": step,
        "training_seconds": round(seconds, 1),
        "training_loss": round(loss.item(), 4),
    }


@torch.no_grad()
def record(
    model: Model, settings: Settings, data: Tensor, device: torch.device
) -> tuple[Tensor, dict[str, float]]:
    """([streams, recorded, layers, K] ids of held-out text, its loss and how evenly the experts are used).

    Attention is causal, so what a token routes to does not depend on whether those after it are there: one
    pass over a text gives what decoding it token by token gives.
    """
    length = settings.prompt + settings.recorded
    gap = (len(data) - length - 1) // settings.streams
    if gap < length:
        raise SystemExit("train_trace_model: too little text is held out for the sequences to record")
    window = torch.arange(length + 1)
    batch = (
        data[torch.arange(settings.streams)[:, None] * gap + window].long().to(device)
    )  # [streams, length+1]
    model.eval()
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    ids = torch.stack([block.moe.ids for block in model.blocks], dim=1)  # [T, layers, K]
    ids = ids.view(settings.streams, length, settings.layers, settings.top_k)[:, settings.prompt :].cpu()
    entropies = []
    for layer in range(settings.layers):
        load = torch.bincount(ids[:, :, layer].flatten(), minlength=settings.experts).float()
        share = load / load.sum()
        entropies.append(float(-(share * share.clamp_min(1e-12).log()).sum() / math.log(settings.experts)))
    facts = {"held_out_loss": round(loss.item(), 4), "load_entropy_least": round(min(entropies), 4)}
    return ids, {**facts, "load_entropy_most": round(max(entropies), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of .py files"
    )
    parser.add_argument("--most-bytes", type=int, default=64_000_000, help="of text")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    settings = Settings(**{name: given[name] for name in asdict(Settings())})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = files_of(given["text"], given["most_bytes"])
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    held_out = texts[::_HELD_OUT]
    kept = [text for index, text in enumerate(texts) if index % _HELD_OUT]
    data, unseen = tokenise(kept, held_out, settings.vocabulary)
    print(f"{len(files)} files, {len(data)} tokens, {len(unseen)} held out", file=sys.stderr)
    model, training = train(settings, data, device)
    ids, facts = record(model, settings, unseen, device)
    names = "\n".join(path.relative_to(given["text"]).as_posix() for path in files)
    own = given["text"].samefile(sysconfig.get_paths()["stdlib"])
    made = {
        "script": "scripts/train_trace_model.py",
        "settings": asdict(settings),
        "parameters": sum(one.numel() for one in model.parameters()),
        "text": f"standard library of Python {sys.version.split()[0]}"
        if own
        else "another folder of .py files",
        "files": len(files),
        "file_names_sha256": hashlib.sha256(names.encode()).hexdigest(),
        "text_sha256": hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).hexdigest(),
        "tokens": len(data),
        "held_out_tokens": len(unseen),
        **training,
        **facts,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "what": "decode of held-out text, teacher-forced: a row a token, after a prompt that is not recorded",
    }
    trace = RoutingTrace(
        topk_ids=ids.flatten().tolist(),
        num_experts=settings.experts,
        top_k=settings.top_k,
        layers=tuple(f"blocks.{index}.moe" for index in range(settings.layers)),
        call_rows=(1,) * (settings.streams * settings.recorded),
        stream_rows=(settings.recorded,) * settings.streams,
        model="small MoE language model, trained for this trace",
        made=made,
    )
    save(trace, given["output"])
    print(json.dumps(made, indent=1), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
