"""Problems -> token ids, checked against the engine's window before any model loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dapo_pl.errors import UserError
from dapo_pl.rollout.types import Prompt


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The chat prompt up to where the response begins.

    A tokenizer without a chat template (a base model's) gets the contents, each closed by a line end.
    """
    if tokenizer.chat_template is None:
        text = "".join(message["content"] + "\n" for message in messages)
        return tokenizer(text)["input_ids"]  # pyright: ignore[reportReturnType]
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]  # pyright: ignore


def tokenize_prompts(
    problems: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_model_len: int,
    max_tokens: int,
) -> list[Prompt]:
    """Rows of a prompt source -> prompts.

    Args:
        problems: rows with `id`, `messages`, `answer`, `source` and, for reward functions, `question`.
        tokenizer: of the model that answers.
        max_model_len: the engine's window, tokens.
        max_tokens: the generation limit, which must fit behind every prompt.
    """
    prompts = []
    for row, problem in enumerate(problems):
        ids = encode_prompt(tokenizer, problem["messages"])
        if len(ids) + max_tokens > max_model_len:
            raise UserError(
                f"prompt {row} of {problem['source']} (id {problem['id']}) has {len(ids)} tokens, which with "
                f"sampling.max_tokens={max_tokens} is more than the window engine.max_model_len={max_model_len}: "
                "raise the window, lower the limit or leave the prompt out"
            )
        question = problem.get("question", "")
        prompts.append(Prompt(problem["id"], tuple(ids), problem["answer"], problem["source"], question))
    return prompts
