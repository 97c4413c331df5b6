"""The warm start: it learns, is made once for what determines it, and leaves nothing half made."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_pl.data.prompts import encode_prompt
from dapo_pl.errors import UserError
from dapo_pl.warm_start import WarmStartSettings, warm_start, warm_start_key

SETTINGS = WarmStartSettings(steps=12, batch_size=8, learning_rate=3e-3, precision="fp32")


def examples(count: int) -> list:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return [
        ([{"role": "user", "content": f"{a} + {b} ="}], f"{a} + {b} = {a + b}\nAnswer: {a + b}")
        for a, b in (pairs * math.ceil(count / len(pairs)))[:count]
    ]


def loss_on(model: Path | str, pairs: list) -> float:
    """Mean nats per response token, end token included, by the definition."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    total, tokens = 0.0, 0
    for messages, response in pairs:
        prompt = encode_prompt(tokenizer, messages)
        ids = tokenizer(response)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
        tokens += len(ids)
    return total / tokens


def test_learns_from_the_loss_it_reports_and_is_made_once(tiny_model: str, tmp_path: Path) -> None:
    pairs = examples(96)
    losses: list[float] = []
    result = warm_start(Path(tiny_model), pairs, SETTINGS, tmp_path, lambda step, loss: losses.append(loss))
    assert len(losses) == 12
    assert losses[0] == pytest.approx(loss_on(tiny_model, pairs[:8]), rel=1e-4)
    assert loss_on(result, pairs[:16]) < 0.7 * losses[0]

    def never(step: int, loss: float) -> None:
        raise AssertionError("a cached result was made again")

    assert warm_start(Path(tiny_model), pairs, SETTINGS, tmp_path, never) == result


def test_the_key_follows_everything_that_determines_the_result(tiny_model: str, tmp_path: Path) -> None:
    pairs = examples(96)
    key = warm_start_key(Path(tiny_model), pairs, SETTINGS)
    assert warm_start_key(Path(tiny_model), pairs, SETTINGS) == key
    for field, value in (("steps", 11), ("learning_rate", 1e-3), ("seed", 1), ("precision", "bf16")):
        assert warm_start_key(Path(tiny_model), pairs, dataclasses.replace(SETTINGS, **{field: value})) != key
    assert warm_start_key(Path(tiny_model), pairs[::-1], SETTINGS) != key
    moved = tmp_path / "model"
    shutil.copytree(tiny_model, moved)
    assert warm_start_key(moved, pairs, SETTINGS) == key
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert warm_start_key(moved, pairs, SETTINGS) != key


def test_an_interruption_leaves_no_result(tiny_model: str, tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(Path(tiny_model), examples(96), SETTINGS, tmp_path, stop)
    assert list(tmp_path.iterdir()) == []


def test_too_few_examples_and_impossible_settings(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs 96 worked examples and has 95"):
        warm_start(Path(tiny_model), examples(95), SETTINGS, tmp_path)
    with pytest.raises(UserError, match="warm_start=none"):
        WarmStartSettings(steps=0, batch_size=8, learning_rate=1e-3)
