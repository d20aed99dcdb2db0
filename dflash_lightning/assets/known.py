"""Configurations of the targets that the shipped recipes name, for planning without a hub."""

import json
from pathlib import PurePath
from typing import TYPE_CHECKING

from dflash_lightning.assets import FOLDER

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def known_config(path: str) -> "PretrainedConfig | None":
    """The text configuration of a bundled target; None for any other.

    The last part of the name decides, so that a folder of another machine is known as well.

    Args:
        path: Hub name or folder.

    >>> known_config("Qwen/Qwen3-8B").num_hidden_layers, known_config("someone/else")
    (36, None)
    """
    from transformers import AutoConfig

    for file in sorted((FOLDER / "targets").glob("*.json")):
        facts = json.loads(file.read_text())
        names = {name.rpartition("/")[2].casefold() for name in facts["names"]}
        if PurePath(path).name.casefold() in names:
            values = dict(facts["config"])
            return AutoConfig.for_model(values.pop("model_type"), **values)
    return None
