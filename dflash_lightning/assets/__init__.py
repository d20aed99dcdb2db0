"""What the quick start is made of: prompts, the target's answers to them, and the small target.

``prompts.jsonl`` was written for this project. ``chats.jsonl.gz`` holds SmolLM2's own answers;
rebuild it with ``dflash-lightning regenerate --prompts dflash_lightning/assets/prompts.jsonl
--target smollm2 --output chats.jsonl``. ``heldout.jsonl`` holds prompts on topics that occur in
neither.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
PROMPTS = FOLDER / "prompts.jsonl"
HELDOUT = FOLDER / "heldout.jsonl"
CHATS = FOLDER / "chats.jsonl.gz"


def cache_folder() -> Path:
    """Where converted targets and prepared rows are kept: ``$DFLASH_CACHE`` or the user's cache."""
    root = os.environ.get("DFLASH_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "dflash_lightning"
