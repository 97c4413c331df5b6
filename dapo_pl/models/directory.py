"""Any transformers directory or hub name, and what can be known of it before its weights are loaded."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
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
# What changes the function that weights of the same names and shapes compute.
COMPUTATION = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


def default_cache_dir() -> Path:
    """DAPO_PL_CACHE, else the user's cache directory."""
    if named := os.environ.get("DAPO_PL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo_pl"


@contextmanager
def whole_directory(target: Path, cure: str, *, replace: bool = True) -> Iterator[Path]:
    """A directory to write into that becomes `target` at the end, or vanishes if anything goes wrong.

    Args:
        target: what it becomes.
        cure: what to do when the disk refuses, for the message.
        replace: whether a `target` that is there by then gives way; otherwise it stays and the new one vanishes.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        with (
            tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as place,
            (Path(place) / "in-use").open("w") as in_use,
        ):
            fcntl.flock(in_use, fcntl.LOCK_EX)
            draft = Path(place) / target.name  # one level down: the temporary directory itself is closed to others
            draft.mkdir()
            yield draft
            if replace:
                shutil.rmtree(target, ignore_errors=True)
            try:
                draft.rename(target)
            except OSError:
                if replace or not target.is_dir():
                    raise
    except Exception as error:
        # safetensors and tokenizers raise exceptions of their own for a full disk, ending in "(os error 28)".
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise UserError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}; {cure}") from error


def _remove_abandoned(target: Path) -> None:
    """Drafts of `target` whose writer was killed: it no longer holds their lock."""
    for place in target.parent.glob(f".{target.name}-*"):
        try:
            with (place / "in-use").open() as in_use:
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        shutil.rmtree(place, ignore_errors=True)


def cached_directory(cache_dir: str | Path | None, name: str, make: Callable[[Path], object]) -> Path:
    """`cache_dir/name`, made once by `make(draft directory)`."""
    target = Path(cache_dir or default_cache_dir()).expanduser() / name
    if not target.is_dir():
        cure = "free space or set model.cache_dir to a writable place"
        # Of two processes that make it at once the first one's stays: it may be being read already.
        with whole_directory(target, cure, replace=False) as draft:
            make(draft)
    return target


@dataclass
class HubOrDirectory:
    """`model=hf model.path=...`."""

    path: str

    @property
    def name(self) -> str:
        """The path's last part."""
        return Path(self.path).name

    def prepare(self) -> str:
        """The path as it is, but for a leading ~, which no shell expands there; `check_model` judges it."""
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path


@dataclass(frozen=True)
class ModelFacts:
    """What a model's files say without its weights.

    `vocabulary` counts the rows of the embedding. `end_ids` are the tokenizer's end token and those that
    generation_config.json adds. `pad_id` is the end token where the tokenizer has no padding token.
    `fingerprint` is a hash of the architecture and the vocabulary: two models with the same one can exchange
    checkpoints.
    """

    architecture: str
    vocabulary: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    parameters: int
    end_ids: tuple[int, ...]
    pad_id: int
    fingerprint: str


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
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


def check_model(path: str | Path) -> ModelFacts:
    """Facts about a transformers directory or hub name; `UserError` for what would fail later."""
    path, directory = str(path), Path(path)
    looks_local = directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if looks_local and not directory.is_dir():
        raise UserError(f"model.path: there is no directory {path}; name a transformers directory or a hub name")
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UserError(f"model.path: {path} has no config.json, so it is no transformers directory")
        _check_weights(directory)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: transformers cannot read the config of {path!r} ({str(error).splitlines()[0]}); name a "
            "transformers directory or a hub name that can be reached"
        ) from error
    tokenizer = load_tokenizer(path)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        heads, positions = text.num_attention_heads, text.max_position_embeddings
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"model.path: {path} is a {config.model_type} model; choose a decoder with attention that "
            "AutoModelForCausalLM loads (Qwen2, Llama and the like)"
        ) from error
    try:
        stated = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        stated = None
    stated = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    end_ids = tuple(dict.fromkeys([int(tokenizer.eos_token_id), *stated]))  # pyright: ignore[reportArgumentType]
    # Padding is masked wherever it stands, so the end token serves where there is none of its own.
    pad = tokenizer.pad_token_id
    pad_id = end_ids[0] if pad is None else int(pad)  # pyright: ignore[reportArgumentType]
    vocabulary = model.get_input_embeddings().num_embeddings
    if max(*end_ids, pad_id) >= vocabulary:
        raise UserError(
            f"model {path}: the ids of the end and padding tokens, {[*end_ids, pad_id]}, go beyond the {vocabulary} "
            "tokens the model knows; put the model's own tokenizer.json and tokenizer_config.json there"
        )
    return ModelFacts(
        architecture=type(model).__name__,
        vocabulary=vocabulary,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_position_embeddings=positions,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        end_ids=end_ids,
        pad_id=pad_id,
        fingerprint=_fingerprint(model, text, tokenizer),
    )


def _check_weights(directory: Path) -> None:
    file = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if file is None:
        raise UserError(f"model.path: {directory} has no weights (model.safetensors or pytorch_model.bin)")
    if file.suffix == ".json":
        shards = set(json.loads(file.read_text())["weight_map"].values())
        if absent := sorted(shard for shard in shards if not (directory / shard).is_file()):
            raise UserError(
                f"model.path: {directory} lacks {absent[0]}, a part of the weights that {file.name} lists: copy it"
            )


def _fingerprint(model: Any, config: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    computation = [getattr(config, name, None) for name in COMPUTATION]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    text = json.dumps([type(model).__name__, shapes, computation, vocabulary], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
