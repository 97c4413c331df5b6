"""A short supervised phase on worked examples, before reinforcement learning.

A small base model answers almost nothing correctly, so Dynamic Sampling would hardly ever find a mixed
group: the cold start. A few steps on worked examples teach the form of an answer. They must stay few, and
the examples varied, or the entropy that exploration lives on is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dapo_pl.data.prompts import encode_prompt
from dapo_pl.errors import UserError
from dapo_pl.models.directory import whole_directory
from dapo_pl.objective import aggregate
from dapo_pl.policy import CausalPolicy, micro_batches

Example = tuple[Sequence[Any], str]
"""Chat messages (role, content) and the response to imitate."""


@dataclass(frozen=True)
class WarmStartSettings:
    """How long and how fast to imitate.

    `seed` and `direct_share` (examples that state the answer without steps) choose the examples.
    `learning_rate` rises over the first tenth of the steps and then falls linearly to a tenth. `precision` is
    `bf16` (autocast, fp32 weights) or `fp32`.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    direct_share: float = 0.0
    precision: str = "bf16"
    max_tokens_per_micro_batch: int = 4096

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise UserError("warm_start.steps and warm_start.batch_size must be at least 1; warm_start=none skips it")
        if not 0 <= self.direct_share <= 1:
            raise UserError(f"warm_start.direct_share is {self.direct_share}; it is a share, from 0 to 1")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"warm_start.precision is {self.precision!r}; known are bf16, fp32")


def warm_start_key(model: Path, examples: Sequence[Example], settings: WarmStartSettings) -> str:
    """Hash of everything that determines the result: the model's files, the examples in order, the settings."""
    digest = hashlib.sha256()
    suffixes = (".json", ".safetensors", ".bin", ".jinja")
    for file in sorted(path for path in model.iterdir() if path.suffix in suffixes):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    digest.update(json.dumps([examples, asdict(settings)]).encode())
    return digest.hexdigest()[:16]


def warm_start(
    model: Path,
    examples: Sequence[Example],
    settings: WarmStartSettings,
    cache_dir: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Path:
    """Train `model` on `steps` × `batch_size` worked examples; the result is a cached transformers directory.

    Args:
        model: a local transformers directory.
        examples: at least `steps * batch_size` of them; each is seen once.
        settings: see `WarmStartSettings`.
        cache_dir: where results live; an interrupted run leaves none.
        on_step: called with the step (from 1) and its loss, nats per token.
    """
    needed = settings.steps * settings.batch_size
    if len(examples) < needed:
        raise UserError(f"the warm start needs {needed} worked examples and has {len(examples)}")
    examples = examples[:needed]
    target = cache_dir / f"warm-start-{warm_start_key(model, examples, settings)}"
    if target.exists():
        return target

    tokenizer = AutoTokenizer.from_pretrained(model)
    end = [tokenizer.eos_token_id]
    pairs = [
        (encode_prompt(tokenizer, messages), tokenizer(response, add_special_tokens=False)["input_ids"] + end)
        for messages, response in examples
    ]
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = CausalPolicy(network.to(device), share_prompts=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    rise = max(1, settings.steps // 10)

    def rate(step: int) -> float:
        return min((step + 1) / rise, 1 - 0.9 * (step - rise + 1) / max(1, settings.steps - rise), 1.0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    low = torch.autocast(device, torch.bfloat16) if settings.precision == "bf16" else nullcontext()
    for step in range(settings.steps):
        batch = pairs[step * settings.batch_size : (step + 1) * settings.batch_size]
        tokens = torch.tensor(sum(len(response) for _, response in batch), device=device)
        total = 0.0
        for micro in micro_batches(
            [prompt for prompt, _ in batch],
            [response for _, response in batch],
            max_tokens=settings.max_tokens_per_micro_batch,
            share_prompts=False,
            pad_id=end[0],
        ):
            with low:
                log_probs, _ = policy(micro.to(device))
            lengths = torch.tensor([len(batch[index][1]) for index in micro.responses], device=device)
            mask = torch.arange(log_probs.shape[1], device=device) < lengths[:, None]
            loss = -aggregate(log_probs, mask, "token_mean", tokens.float())
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        on_step(step + 1, total)

    save_model(network, tokenizer, target)
    return target


def save_model(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Write a transformers directory whole or not at all."""
    with whole_directory(target, "free space or choose another place") as draft:
        network.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
