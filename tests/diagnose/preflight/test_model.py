"""Models are folders, config.json, repositories in the cache, or packs of headers, read without trust."""

import struct
import zipfile
from pathlib import Path

import pytest
from checkpoint_headers import Size, qwen3, write_headers

from moedoctor.diagnose.checkpoint.safetensors_header import read_header
from moedoctor.diagnose.preflight.model import ModelError, open_model, pack_headers, unpack_headers


def test_a_pack_gives_the_same_headers(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "model", qwen3("modelopt-nvfp4"))
    (folder / "tokenizer.json").write_text("{}")
    size = pack_headers(folder, tmp_path / "model.zip")
    assert size < 20_000 < (folder / "model.safetensors").stat().st_size
    with open_model(str(folder)) as given, open_model(str(tmp_path / "model.zip")) as packed:
        assert list(packed.headers.values()) == list(given.headers.values())
        assert read_header(packed.folder / "model.safetensors")  # with all of its data
        assert not (packed.folder / "tokenizer.json").exists()
        kept = packed.folder
    assert not kept.exists()


def test_a_config_alone(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "model", qwen3())
    with open_model(str(folder / "config.json")) as model:
        assert model.headers == {}
        assert model.notes == ("config.json alone, without a checkpoint",)


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    write_headers(snapshot, qwen3(size=Size(layers=1)))
    write_headers(snapshot.with_name("newer"), qwen3(size=Size(layers=1)))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")  # what vLLM takes, without --revision
    with open_model("org/name") as model:
        assert model.folder == snapshot
    with open_model("org/name", "newer") as model:
        assert model.folder == snapshot.with_name("newer")
    for name in ("org/other", "../../etc", "name"):
        with pytest.raises(ModelError, match="not in the Hugging Face cache"), open_model(name):
            pass


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "model", qwen3())
    (folder / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match=r"model\.safetensors"), open_model(str(folder)):
        pass


_HEADER = b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("../config.json", b"{}"),
        ("a/config.json", b"{}"),
        ("run.py", b""),
        ("model.safetensors", b"short"),
        ("model.safetensors", struct.pack("<Q", 5) + _HEADER),
        ("model.safetensors", struct.pack("<Q", len(_HEADER)) + _HEADER.replace(b"0,4", b"0,99999999999999")),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]x"),
    ],
)
def test_a_hostile_pack_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    pack = tmp_path / "pack.zip"
    with zipfile.ZipFile(pack, "w") as file:
        file.writestr("config.json", "{}")
        file.writestr(name, data)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(ModelError, match="moedoctor preflight headers"):
        unpack_headers(pack, folder)
    assert not (tmp_path / "config.json").exists()


def test_a_pack_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "pack.zip").write_bytes(b"PK nothing")
    with pytest.raises(ModelError, match="expected a file that"), open_model(str(tmp_path / "pack.zip")):
        pass
