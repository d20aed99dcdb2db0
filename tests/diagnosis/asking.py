"""What tests of the command share: the types of their fixtures, and words as they read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Ask = Callable[..., str]
Told = Callable[..., dict[str, Any]]
Folder = Callable[..., Path]


def flat(text: str) -> str:
    """Without line breaks and indents."""
    return " ".join(text.split())
