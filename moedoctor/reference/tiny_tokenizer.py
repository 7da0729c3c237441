"""A tokenizer for a tiny checkpoint: token 7 is the word ``t7``, so that an engine can be asked in text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPECIAL = ("<unk>", "<s>", "</s>")


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """Write ``tokenizer.json`` and its config into the existing `folder` of a checkpoint; the folder.

    The first three tokens stand for unknown words, the beginning and the end of a text, as the configs of
    `moedoctor.reference.checkpoints` have it. Raises ValueError for a vocabulary without any word.
    """
    if vocab <= len(_SPECIAL):
        raise ValueError(f"vocab: {vocab}, expected more than {len(_SPECIAL)}")
    words = [*_SPECIAL, *(f"t{token}" for token in range(len(_SPECIAL), vocab))]
    model = {
        "type": "WordLevel",
        "vocab": {word: token for token, word in enumerate(words)},
        "unk_token": _SPECIAL[0],
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
