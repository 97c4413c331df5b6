"""Any transformers directory or hub name, and what can be known of it before its weights are loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dapo_pl.errors import UserError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def default_cache_dir() -> Path:
    """DAPO_PL_CACHE, else the user's cache directory."""
    if named := os.environ.get("DAPO_PL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo_pl"


@contextmanager
def whole_directory(target: Path, cure: str) -> Iterator[Path]:
    """A directory to write into that becomes `target` at the end, or vanishes if anything goes wrong.

    Args:
        target: replaced if it exists.
        cure: what to do when the disk refuses, for the message.
    """
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}; {cure}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def cached_directory(cache_dir: str | Path | None, name: str, make: Callable[[Path], None]) -> Path:
    """`cache_dir/name`, made once by `make(draft directory)`."""
    target = Path(cache_dir or default_cache_dir()) / name
    if not target.is_dir():
        with whole_directory(target, "free space or set model.cache_dir to a writable place") as draft:
            make(draft)
    return target


@dataclass
class HubOrDirectory:
    """`model=hf model.path=...`."""

    path: str

    def prepare(self) -> str:
        """The path as it is; `check_model` judges it."""
        return str(self.path)


@dataclass(frozen=True)
class ModelFacts:
    """What a model's files say without its weights.

    `fingerprint` is a hash of the architecture and the vocabulary: two models with the same one can exchange
    checkpoints.
    """

    architecture: str
    vocabulary: int
    head_dim: int
    max_position_embeddings: int
    parameters: int
    end_ids: tuple[int, ...]
    pad_id: int
    fingerprint: str


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a sentence when there is none or it has no end token."""
    directory = Path(path)
    # For a directory without tokenizer files transformers makes up an empty tokenizer of the model's class.
    found = not directory.is_dir() or any((directory / name).is_file() for name in TOKENIZERS)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path) if found else None
    except (OSError, ValueError, KeyError):
        tokenizer = None
    if tokenizer is None:
        raise UserError(
            f"model {path}: there is no tokenizer that transformers can load; put tokenizer.json and "
            "tokenizer_config.json into the directory"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model {path}: its tokenizer has no end token, so no response would ever end; set eos_token in "
            "tokenizer_config.json"
        )
    return tokenizer


def check_model(path: str) -> ModelFacts:
    """Facts about a transformers directory or hub name; `UserError` for what would fail later."""
    directory = Path(path)
    looks_local = directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if looks_local and not directory.is_dir():
        raise UserError(f"model.path: there is no directory {path}; name a transformers directory or a hub name")
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UserError(f"model.path: {path} has no config.json, so it is no transformers directory")
        if not any((directory / name).is_file() for name in WEIGHTS):
            raise UserError(f"model.path: {path} has no weights (model.safetensors or pytorch_model.bin)")
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: transformers cannot read the config of {path!r} ({str(error).splitlines()[0]}); name a "
            "transformers directory or a hub name that can be reached"
        ) from error
    tokenizer = load_tokenizer(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        stated = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        stated = None
    stated = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    end_ids = tuple(dict.fromkeys([int(tokenizer.eos_token_id), *stated]))  # pyright: ignore[reportArgumentType]
    # Padding is masked wherever it stands, so the end token serves where there is none of its own.
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_ids[0]
    return ModelFacts(
        architecture=type(model).__name__,
        vocabulary=model.get_input_embeddings().num_embeddings,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        end_ids=end_ids,
        pad_id=int(pad_id),  # pyright: ignore[reportArgumentType]
        fingerprint=_fingerprint(model, tokenizer),
    )


def _fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    text = json.dumps([type(model).__name__, shapes, vocabulary])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
