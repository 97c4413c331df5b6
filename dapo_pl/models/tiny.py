"""A Qwen2-architecture model of a few million parameters with a byte-level tokenizer, made here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from dapo_pl.errors import UserError
from dapo_pl.models.directory import cached_directory

PAD, END, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM's attention on a CPU takes no others


@dataclass
class TinyModel:
    """For tests and ablations: random weights from `seed`, tied embeddings, float32.

    Args:
        cache_dir: where the directory is made, once for these settings; the platform's cache when None.
        hidden_size, layers, heads, kv_heads, intermediate_size: the architecture.
        seed: of the initial weights.
        max_position_embeddings: longest prompt and response together, tokens (here: bytes).
    """

    cache_dir: str | Path | None = None
    hidden_size: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 512
    seed: int = 0
    max_position_embeddings: int = 512

    def __post_init__(self) -> None:
        for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "max_position_embeddings"):
            if getattr(self, key) < 1:
                raise UserError(f"model.{key} is {getattr(self, key)}; it must be at least 1")
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"model.hidden_size {self.hidden_size} must be a multiple of model.heads {self.heads}, and that of "
                f"model.kv_heads {self.kv_heads}"
            )
        if self.hidden_size // self.heads not in HEAD_SIZES:
            raise UserError(
                f"model.hidden_size / model.heads is {self.hidden_size // self.heads}, and on a CPU vLLM runs only "
                f"heads of {', '.join(map(str, HEAD_SIZES))}: change model.heads or model.hidden_size"
            )

    @property
    def name(self) -> str:
        """`tiny-` and a hash of the settings."""
        settings = {name: value for name, value in asdict(self).items() if name != "cache_dir"}
        digest = hashlib.sha256(json.dumps([settings, SPECIAL, TEMPLATE]).encode()).hexdigest()[:12]
        return f"tiny-{digest}"

    def prepare(self) -> Path:
        """The directory, made if it is not there."""
        return cached_directory(self.cache_dir, self.name, self._make)

    def _make(self, directory: Path) -> None:
        tokenizer = byte_tokenizer()
        vocabulary = tokenizer.get_vocab()
        end, pad = vocabulary[END], vocabulary[PAD]
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=True,
            eos_token_id=end,
            pad_token_id=pad,
            bos_token_id=None,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = Qwen2ForCausalLM(config)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def byte_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, and one per special token: `decode(encode(x)) == x` for any text.

    (Any in Unicode's composed form, NFC: Qwen2's normalisation composes the rest.) No byte is unknown, so
    `unk_token` is never used.

    It is Qwen2's own tokenizer without merges, because transformers loads a Qwen2 model's tokenizer as that
    class whatever the files say.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *symbols])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        bos_token=None,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
