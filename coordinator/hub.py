"""A published model as a folder: ``python -P -m coordinator.hub REPOSITORY FOLDER``.

In a process of its own, as huggingface_hub brings an HTTP client with threads. It knows the user's
mirror, token and cache by itself. Only what a model and its tokenizer need is taken.
"""

from __future__ import annotations

import sys
from typing import Final

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "LICENSE*")


def main() -> None:
    """Download; what goes wrong is the last line of standard error."""
    from huggingface_hub import snapshot_download

    snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=list(WANTED))


if __name__ == "__main__":
    main()
