"""Looks up in the sources of vLLM's releases the texts on which "since" and "up to" of an entry rest.

``python scripts/release_texts.py FOLDER`` reads ``FOLDER/X.Y.Z/vllm`` and writes reports/sources/texts.json:
the releases that were read, and for each text of `TEXTS` those that hold it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packaging.version import Version

TABLE = Path(__file__).resolve().parent.parent / "reports" / "sources" / "texts.json"
TEXTS = {
    "VLLM_WSL2_ENABLE_PIN_MEMORY": ("MD002", "envs.py"),
    "Cannot re-initialize the input batch when CPU weight": ("MD009", "v1/worker/gpu_model_runner.py"),
    "If this is unintended, verify that k/v_scale": ("MD012", "**/quantization/kv_cache.py"),
    "set_offloader": ("MD013", "v1/worker/gpu/model_runner.py"),
    "must match w3": ("MD014", "**/quark_moe.py"),
    "Activation global scales should not be None": ("MD015", "**/fused_moe/**/*.py"),
}
"""Text -> the entry that needs it, and the files of vLLM that may hold it."""


def main(folder: Path) -> None:
    """Write the table."""
    releases = sorted((each.name for each in folder.iterdir() if (each / "vllm").is_dir()), key=Version)
    rows = [
        {
            "entry": entry,
            "text": text,
            "files": files,
            "releases": [
                release
                for release in releases
                if any(text in file.read_text("utf-8") for file in (folder / release / "vllm").glob(files))
            ],
        }
        for text, (entry, files) in TEXTS.items()
    ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps({"read": releases, "texts": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
