"""The tokenizer of tiny checkpoints, read by the library that engines use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moedoctor.reference.tiny_tokenizer import write_tokenizer


def test_words_and_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 8)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert model["vocab"] == {
        "<unk>": 0, "<s>": 1, "</s>": 2, "t3": 3, "t4": 4, "t5": 5, "t6": 6, "t7": 7,
    }  # fmt: skip
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert [config[f"{name}_token"] for name in ("unk", "bos", "eos")] == list(model["vocab"])[:3]


def test_text_there_and_back(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    read = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path, 512) / "tokenizer.json"))
    assert read.encode("t265 t511 nonsense t43").ids == [265, 511, 0, 43]
    assert read.decode([265, 43, 7]) == "t265 t43 t7"


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab: 3, expected more than 3"):
        write_tokenizer(tmp_path, 3)
