"""Reads the experts of one layer from a checkpoint folder, as a capsule holds them.

Engines repack weights when they load them; the files still have them as they were published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moedoctor.text import TextFileError, read_text
from moedoctor.trace.capsule import CapsuleError

PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), (None, "up_proj", "down_proj"))
"""The projections of an expert by the names that checkpoints use; a model without a gate has two."""
_INDEX = "model.safetensors.index.json"
_MOST_INDEX_BYTES = 64 << 20
_GLOBAL = ("weight_scale_2", "weight_global_scale")
"""A scale that dequantizes, and one that quantizes (compressed-tensors)."""
_FP8 = ("weight_scale", "weight_scale_inv")
"""Both dequantize: of a matrix or its rows, and of blocks."""
_INPUT = ("input_scale", "input_global_scale")


class ExpertFiles:
    """The tensors of a checkpoint, read by name. Each file is opened once, and stays open."""

    def __init__(self, folder: Path) -> None:
        """Raises CapsuleError if the folder has no safetensors files."""
        self._folder = folder
        self._files = _list_files(folder)
        self._open: dict[str, Any] = {}
        """File -> what reads it: to open one takes longer than to read an expert."""

    def read_tensors(self, layer: str, experts: Sequence[int], quantization: str) -> dict[str, torch.Tensor]:
        """Return ``w13``, ``w2`` and their scales for these experts of a layer, and the input scales.

        `layer` is the name of the module with the experts, ``model.layers.3.mlp.experts``. Raises
        CapsuleError if the checkpoint does not have them, or not in a form that capsules know.
        """
        names = next((names for names in PROJECTIONS if self._has(layer, experts[0], names)), None)
        if names is None:
            raise CapsuleError(f"{self._folder.name} has no weights of {layer}.{experts[0]}")
        gate, up, down = names
        first, second = [name for name in (gate, up) if name is not None], [down or ""]
        tensors: dict[str, torch.Tensor] = {}
        for target, scale, projections in (
            ("w13", "input_scale", first),
            ("w2", "intermediate_scale", second),
        ):
            modules = [[f"{layer}.{expert}.{name}" for name in projections] for expert in experts]
            tensors |= _stack(target, [[self._read(name, quantization) for name in each] for each in modules])
            found = [self._read_input_scale(name) for each in modules for name in each]
            scales = [value for value in found if value is not None]
            if scales:
                tensors[scale] = torch.stack(scales).max()  # []
        return tensors

    def _has(self, layer: str, expert: int, names: tuple[str | None, ...]) -> bool:
        modules = (f"{layer}.{expert}.{name}" for name in names if name is not None)
        return all(self._find(module, ("weight", "weight_packed")) for module in modules)

    def _find(self, module: str, parts: tuple[str, ...]) -> str | None:
        return next((part for part in parts if f"{module}.{part}" in self._files), None)

    def _read(self, name: str, quantization: str) -> dict[str, torch.Tensor]:
        """Return the tensors of one linear layer: ``""`` the values, ``_block_scales`` and ``_scale``."""
        packed = f"{name}.weight_packed"
        values = self._read_tensor(packed if packed in self._files else f"{name}.weight")  # [N, K]
        if quantization == "bf16":
            return {"": values}
        if quantization == "fp8":
            found = self._find(name, _FP8) or _FP8[0]
            scale = self._read_tensor(f"{name}.{found}", "a scale").float()
            if scale.numel() > 1 and scale.dim() != 2:
                raise CapsuleError(f"{name}.{found} is {list(scale.shape)}, expected one scale or [R, C]")
            return {"": values, "_scale": scale if scale.numel() > 1 else scale.reshape(())}
        found = self._find(name, _GLOBAL) or _GLOBAL[0]
        scale = self._read_tensor(f"{name}.{found}").float().reshape(())  # []
        return {
            "": values,
            "_block_scales": self._read_tensor(f"{name}.weight_scale"),
            "_scale": 1 / scale if found == _GLOBAL[1] else scale,
        }

    def _read_input_scale(self, name: str) -> torch.Tensor | None:
        found = self._find(name, _INPUT)
        if found is None:
            return None
        scale = self._read_tensor(f"{name}.{found}").float().reshape(-1)[0]  # []
        return 1 / scale if found == _INPUT[1] else scale

    def _read_tensor(self, name: str, what: str = "a tensor") -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files.get(name)
        if file is None:
            raise CapsuleError(f"{self._folder.name} has no {name}, expected {what}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CapsuleError(f"{file}: {name} cannot be read: {error}") from None
        return tensor


def _stack(target: str, experts: Sequence[Sequence[Mapping[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Return a weight of a capsule, of a dictionary for each projection of each expert."""
    tensors: dict[str, torch.Tensor] = {}
    for part in experts[0][0]:
        if part == "_scale" and experts[0][0][part].dim() == 2:
            blocks = [torch.cat([projection[part] for projection in each]) for each in experts]  # [R, C] each
            tensors[f"{target}{part}"] = torch.stack(blocks)
            continue
        if part == "_scale":
            listed = [torch.stack([projection[part] for projection in each]) for each in experts]
            scales = torch.stack(listed)  # [U, projections]
            alike = bool((scales == scales[:, :1]).all())
            tensors[f"{target}{part}"] = scales[:, 0].contiguous() if alike else scales
            continue
        rows = [
            torch.cat([_view_bytes(projection[part]) for projection in each]) for each in experts
        ]  # [N, K] each
        tensors[f"{target}{part}"] = torch.stack(rows).view(experts[0][0][part].dtype)
    return tensors


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as bytes, because torch cannot join them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _list_files(folder: Path) -> dict[str, str]:
    """Return name -> file of every tensor."""
    index = folder / _INDEX
    if not index.exists():
        return _read_names(folder, sorted(path.name for path in folder.glob("*.safetensors")))
    try:
        known: Any = json.loads(read_text(index, _MOST_INDEX_BYTES, "an index of safetensors files"))
        files = known["weight_map"]
        names = {str(name): str(file) for name, file in files.items()}
    except (TextFileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CapsuleError(f"{index.name} cannot be used: {error}") from None
    outside = next((file for file in names.values() if Path(file).name != file), None)
    if outside is not None:
        raise CapsuleError(f"{index.name} names the file {outside[:80]!r}, expected one of its own folder")
    return names


def _read_names(folder: Path, files: Sequence[str]) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    if not files:
        raise CapsuleError(f"{folder.name} has no safetensors files")
    names: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as source:
                names |= dict.fromkeys(source.keys(), file)
        except (OSError, SafetensorError) as error:
            raise CapsuleError(f"{file} cannot be read: {error}") from None
    return names
