"""What every prompt source has in common: the columns it returns, the prompt template, the problem id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Literal, Protocol, TypedDict, get_args

from datasets import Dataset, Features, List, Value

from dapo_pl.errors import UserError

Split = Literal["train", "evaluation"]

DEFAULT_TEMPLATE = "{question}\nWork step by step. The last line must be 'Answer: <integer>'."
"""Chat prompt of every problem that does not bring its own; short, since each rollout pays for its tokens."""

FEATURES = Features(
    {
        "id": Value("string"),
        "messages": List({"role": Value("string"), "content": Value("string")}),
        "answer": Value("int64"),
        "source": Value("string"),
        "question": Value("string"),
    }
)


class Message(TypedDict):
    """One turn of a chat prompt."""

    role: str
    content: str


class Problem(TypedDict):
    """One row of a prompt source.

    `id` is derived from question and answer alone, so that runs with different templates, seeds or file
    orders can be compared problem by problem.
    """

    id: str
    messages: list[Message]
    answer: int
    source: str
    question: str


class PromptSource(Protocol):
    """Anything that yields problems."""

    def load(self, split: Split) -> Dataset:
        """The split's problems, no two alike, with the columns of `FEATURES`; `UserError` if it cannot."""
        ...


def make_problem(question: str, answer: int, source: str, messages: list[Message]) -> Problem:
    """A row whose id is the first 16 hex digits of a hash of question and answer."""
    content = json.dumps([question.strip(), answer], ensure_ascii=False)
    return {
        "id": hashlib.sha256(content.encode()).hexdigest()[:16],
        "messages": messages,
        "answer": answer,
        "source": source,
        "question": question,
    }


def make_dataset(problems: Iterable[Problem]) -> Dataset:
    """The problems as a data set with the columns of `FEATURES`, in their order."""
    rows = list(problems)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in FEATURES}, features=FEATURES)


def fits_int64(answer: int) -> bool:
    """Whether the answer can stand in the `answer` column."""
    return -(2**63) <= answer < 2**63


def check_template(template: str) -> None:
    """Raise `UserError` unless the template names the place of the question exactly once."""
    count = template.count("{question}")
    if count != 1:
        raise UserError(f"data.template must contain {{question}} exactly once, it contains it {count} times.")


def check_split(split: str) -> None:
    """Raise `ValueError` for anything but the two splits: a misspelt one must not pass for the other."""
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}, must be one of {get_args(Split)}")


def fill_template(template: str, question: str) -> list[Message]:
    r"""The chat prompt of a bare question: one user message. Other braces, as in \boxed{}, stay as they are."""
    return [{"role": "user", "content": template.replace("{question}", question.strip())}]
