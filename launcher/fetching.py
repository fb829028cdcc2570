"""The script that `launch prepare` starts to bring what lies on the hub into the hub's cache here.

Under the trainer's interpreter, whose `huggingface_hub` training uses: standard library and that package
only, Python 3.10 and later. Takes a JSON list as its argument and prints one, an object each: `path` of
the snapshot or the file, or `error`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# what no PyTorch model is loaded from
OTHERS = (
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.ot",
    "*.tflite",
    "*.gguf",
    "*.pth",
    "original/*",
    "onnx/*",
)
TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates/*", "config.json", "*.py",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def fetch(hub: Any, name: str, role: str, revision: str | None) -> dict[str, Any]:
    """Download what is not here yet; returns its `path`, and whether the hub was `asked`."""
    kind = "dataset" if role == "data" else "model"
    try:
        # without a network this fails at once, where a download tries again for half a minute
        about = hub.HfApi().repo_info(name, repo_type=kind, revision=revision)
        files = [one.rfilename for one in about.siblings or ()]
    except Exception as error:
        if getattr(error, "response", None) is not None:
            # the hub has answered: no such name, or no leave to read it
            raise
        try:
            return {"path": _path(hub, name, role, revision, [], local=True), "asked": False}
        except Exception:
            # not here: why it cannot be fetched says more than that
            raise error from None
    if role == "data" and "README.md" not in files:
        return {"path": None, "asked": True}
    return {"path": _path(hub, name, role, revision, files, local=False), "asked": True}


def _path(
    hub: Any, name: str, role: str, revision: str | None, files: list[str], *, local: bool
) -> str:
    how: dict[str, Any] = {"revision": revision, "local_files_only": local}
    if role == "data":
        # upstream's key is the commit of this one file, and only where it is in the cache already
        return str(hub.hf_hub_download(name, "README.md", repo_type="dataset", **how))
    if role == "tokenizer":
        how["allow_patterns"] = list(TOKENIZER)
    elif role == "model":
        safe = any(one.endswith(".safetensors") for one in files)
        how["ignore_patterns"] = [*OTHERS, *(("*.bin", "*.pt") if safe else ())]
    return str(hub.snapshot_download(name, **how))


def main() -> None:
    """Each of what is asked for, one after the other: one that fails stops no other."""
    import huggingface_hub as hub

    done = []
    for one in json.loads(sys.argv[1]):
        try:
            done.append(fetch(hub, one["name"], one["role"], one["revision"]))
        except Exception as error:
            told = " ".join(str(error).split()) or type(error).__name__
            done.append({"error": told[:500], "type": type(error).__name__})
    print(json.dumps(done))


if __name__ == "__main__":
    main()
