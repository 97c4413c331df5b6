"""Problems made by reasoning-gym: a named, seeded mix of tasks whose answers are integers."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from typing import Any, Literal

import reasoning_gym
from datasets import Dataset
from reasoning_gym.factory import DATASETS

from dapo_pl.data.sources import (
    DEFAULT_TEMPLATE,
    Split,
    check_split,
    check_template,
    fill_template,
    fits_int64,
    make_dataset,
    make_problem,
)
from dapo_pl.errors import UserError, nearest
from dapo_pl.grading import parse_integer_answer

log = logging.getLogger(__name__)

Item = dict[str, Any]
"""reasoning-gym's `question`, `answer` and `metadata`."""

Part = Literal["evaluation", "warm_start", "train"]

INTEGER_TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "number_sequence",
    "simple_equations",
)
"""Tasks known to suit; any other reasoning-gym task may be named, and is refused if its answers do not."""

STYLES: dict[tuple[str, str], Callable[[Mapping[str, Any]], str]] = {
    ("chain_sum", "short"): lambda metadata: f"{metadata['expression']} =",
}
"""Rewritten questions by (task, style), made from an item's metadata. `chain_sum` in style `short` is the
bare "12 + 7 - 3 =", for character-level models that know no words."""

CHUNK = 2000
"""Items per reasoning-gym data set; item i of one comes from seed + i, so every chunk has its own seed."""

PATIENCE = 2000
"""Draws in a row without a new problem after which a task counts as exhausted."""


@dataclass
class GeneratedProblems:
    """A mix of reasoning-gym tasks, drawn anew from seeds, nothing stored.

    Every question belongs to evaluation (1/4 of all questions), warm start (1/4) or training (1/2) by a hash
    of its text, whatever the seeds and sizes: the parts cannot overlap, and each is a fair sample of
    the task. Within a part no question comes twice. In a small space (one-digit sums) a large part
    therefore has relatively fewer of the easy, soon exhausted questions. Items whose answer is no integer, or
    is wrong, are drawn again; a task where they are more than one in ten is refused.

    Args:
        tasks: reasoning-gym task name to its `weight` (share of the problems, relative to the others; 0 leaves
            the task out; default 1), optionally a `style` of question (see `STYLES`), and the task's own
            reasoning-gym settings (`max_terms` and so on).
        train_size: training problems.
        evaluation_size: evaluation problems.
        seed: of the training problems; has no influence on the evaluation problems.
        evaluation_seed: of the evaluation problems; has no influence on the training problems.
        template: chat prompt, with `{question}` in it once.
    """

    tasks: Mapping[str, Mapping[str, Any]]
    train_size: int
    evaluation_size: int
    seed: int = 0
    evaluation_seed: int = 0
    template: str = DEFAULT_TEMPLATE

    def __post_init__(self) -> None:
        check_template(self.template)
        for key in ("train_size", "evaluation_size"):
            if getattr(self, key) < 1:
                raise UserError(f"data.{key} is {getattr(self, key)}, must be at least 1.")
        for task in self.tasks:
            _check_task(task, self.tasks[task])
        if not any(self._weight(task) for task in self.tasks):
            raise UserError("data.tasks has no task with a weight above 0: nothing to draw problems from.")

    def load(self, split: Split) -> Dataset:
        """The split's problems in random order, `source` being the task; see `PromptSource.load`.

        Raises:
            UserError: a task has too few distinct problems, refuses its settings, or has answers that are no
                integers or wrong.
        """
        check_split(split)
        if split == "train":
            items = self.draw("train", self.train_size, self.seed)
        else:
            items = self.draw("evaluation", self.evaluation_size, self.evaluation_seed)
        return make_dataset(
            make_problem(item["question"], item["answer"], task, fill_template(self.template, item["question"]))
            for task, item in items
        )

    def draw(
        self,
        part: Part,
        size: int,
        seed: int,
        *,
        usable: Callable[[str, Item], bool] = lambda task, item: True,
        distinct: bool = True,
    ) -> list[tuple[str, Item]]:
        """`size` items of a part that are `usable`, as (task, reasoning-gym item), shuffled.

        In each item `question` is in the task's style and `answer` is an int. Unless `distinct`, questions come
        as often as the tasks make them.

        Raises:
            UserError: as `load`.
        """
        drawn: list[tuple[str, Item]] = []
        seen: set[str] | None = set() if distinct else None
        for task, share in self._shares(size).items():
            found = [(task, item) for item in islice(self._new_items(task, part, seed, seen, usable), share)]
            if len(found) < share:
                raise UserError(
                    f"data.tasks.{task} has only {len(found)} distinct problems for {part}, {share} are needed: "
                    f"widen its ranges, lower its weight, or ask for fewer problems."
                )
            drawn += found
        random.Random(_derive_seed(part, seed, "order", 0)).shuffle(drawn)
        return drawn

    def style(self, task: str) -> str | None:
        """The task's style of question, None for reasoning-gym's own."""
        return self.tasks[task].get("style")

    def _weight(self, task: str) -> float:
        return float(self.tasks[task].get("weight", 1.0))

    def _shares(self, size: int) -> dict[str, int]:
        """Problems per task, by largest remainder, so that they add up to `size`."""
        total = sum(self._weight(task) for task in self.tasks)
        exact = {task: size * self._weight(task) / total for task in self.tasks}
        shares = {task: int(share) for task, share in exact.items()}
        by_remainder = sorted(exact, key=lambda task: shares[task] - exact[task])
        for task in by_remainder[: size - sum(shares.values())]:
            shares[task] += 1
        return shares

    def _new_items(
        self, task: str, part: Part, seed: int, seen: set[str] | None, usable: Callable[[str, Item], bool]
    ) -> Iterator[Item]:
        """The task's sound items of a part, only new ones if `seen` is kept, until it seems exhausted."""
        style = self.style(task)
        faults = misses = 0
        for number, item in enumerate(_items(task, self.tasks[task], part, seed), start=1):
            misses += 1
            if misses > PATIENCE:
                return
            fault = _fault(task, item)
            if fault:
                faults += 1
                # a few are drawn again (gsm_symbolic rounds some answers), many mean the wrong task
                if faults > 3 + number // 10:
                    raise UserError(
                        f"data.tasks.{task} is refused: {fault} (row {number}, {faults} such rows so far: "
                        f"{item['question']!r:.200}); use a task or settings with integer answers."
                    )
                log.debug("data.tasks.%s: drawn again, since %s: %r", task, fault, item["question"])
                continue
            if style is not None:
                item["question"] = STYLES[task, style](item["metadata"])
            question = item["question"].strip()
            if _part(question) != part:
                continue
            if seen is not None:
                if question in seen:
                    continue
                seen.add(question)
            item["answer"] = parse_integer_answer(item["answer"])
            if not usable(task, item):
                continue
            misses = 0
            yield item


def _check_task(task: str, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for an unknown task, style or setting, or a weight that is none."""
    if task not in DATASETS:
        raise UserError(f"data.tasks.{task}: reasoning-gym has no such task; {nearest(task, INTEGER_TASKS)}")
    if not isinstance(settings, Mapping):
        raise UserError(f"data.tasks.{task} is {settings!r}, must be a mapping ({{}} for reasoning-gym's settings).")
    weight = settings.get("weight", 1.0)
    if not isinstance(weight, int | float) or weight < 0:
        raise UserError(f"data.tasks.{task}.weight is {weight!r}, must be a number of at least 0.")
    style = settings.get("style")
    if style is not None and (task, style) not in STYLES:
        known = [name for name_task, name in STYLES if name_task == task]
        hint = nearest(style, known) if known else "this task has none"
        raise UserError(f"data.tasks.{task}.style: no style {style!r}; {hint}")
    # size and seed are ours to give
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"} | {"weight", "style"}
    for key in settings:
        if key not in known:
            raise UserError(f"data.tasks.{task}.{key}: no such setting; {nearest(key, known)}")


def _items(task: str, settings: Mapping[str, Any], part: Part, seed: int) -> Iterator[Item]:
    """The endless stream of a task's items in a part's seed stream."""
    config = {key: _plain(value) for key, value in settings.items() if key not in {"weight", "style"}}
    try:
        for chunk in count():
            yield from reasoning_gym.create_dataset(
                task, **config, size=CHUNK, seed=_derive_seed(part, seed, task, chunk)
            )
    # reasoning-gym checks settings with assertions, or not at all and then fails in any way
    except Exception as error:
        raise UserError(f"data.tasks.{task}: reasoning-gym fails with these settings: {error!r}") from error


def _plain(value: Any) -> Any:
    """Lists for whatever sequence the configuration system uses: reasoning-gym wants to add and index them."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _derive_seed(part: str, seed: int, task: str, chunk: int) -> int:
    """A 31-bit seed that shares nothing with its neighbours: seeds 1 and 2 must not give shifted streams."""
    digest = hashlib.sha256(f"{part}/{seed}/{task}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _part(question: str) -> Part:
    """The part a question belongs to, from its text alone."""
    quarter = hashlib.sha256(question.encode()).digest()[0] % 4
    return "evaluation" if quarter == 0 else "warm_start" if quarter == 1 else "train"


def _fault(task: str, item: Item) -> str | None:
    """Why an item cannot be used: its answer is no integer, or not the right one.

    reasoning-gym's `basic_arithmetic` rounds divisions that leave a remainder, and without parentheses
    evaluates from left to right; `gsm_symbolic` rounds down in about 3 of 100 items (99 cookies on pans of
    22 make 4 pans).
    """
    text = item["answer"]
    answer = parse_integer_answer(text)
    if answer is None:
        return f"the answer {text!r:.60} is no integer"
    if not fits_int64(answer):
        return f"the answer {text!r:.60} is too large for 64 bits"
    try:
        if task == "basic_arithmetic" and exact_value(item["metadata"]["expression"]) != answer:
            return f"the answer {text!r} is not the value of the expression"
        if task == "gsm_symbolic":
            for expression, stated in stated_equations(item["metadata"]["answer_cot"]) or []:
                if abs(exact_value(expression) - Fraction(stated)) > Fraction(1, 10**6):
                    return f"its own solution says {expression} = {stated}"
    except ZeroDivisionError:
        return "it divides by zero"
    return None


def exact_value(expression: str) -> Fraction:
    """The value of an expression in + - * / and parentheses.

    Raises:
        ZeroDivisionError: it divides by zero.
        ValueError: it is anything else.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number):
                return Fraction(str(number))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return value(left) / value(right)
        raise ValueError(f"no arithmetic expression: {expression!r}")

    return value(ast.parse(expression.strip(), mode="eval").body)


_NUMBER = r"\d+(?:\.\d+)?"
_EQUATION = re.compile(rf"(\(*-?{_NUMBER}\)*(?: ?[-+*/] ?\(*{_NUMBER}\)*)+) ?= ?(-?{_NUMBER})(?!\d|\.\d| ?[-+*/%])")


def stated_equations(solution: str) -> list[tuple[str, str]] | None:
    """The equations "expression = number" in a worded gsm_symbolic solution, units and currencies removed.

    "28 batches * 9 minutes/batch = 252 minutes" gives ("28 * 9", "252"). None if a line has an equals sign
    but no equation that can be read.
    """
    equations: list[tuple[str, str]] = []
    for line in solution.split("\n"):
        if line.startswith("####"):
            continue
        text = re.sub(r"(?<=\d),(?=\d{3})", "", line).replace("×", "*").replace("÷", "/")
        text = re.sub(r"(?<=[\w)%]) ?x (?=[\d($€£])", " * ", text)
        text = re.sub(r"[$€£]", "", text)
        text = re.sub(r"(\d)\.0\b", r"\1", text)
        text = re.sub(r"[A-Za-z']+(?:[/-][A-Za-z]+)*", " ", text)
        text = re.sub(r"(?<=\d)/ +(?=[^\d( ]|$)", " ", text)
        found = _EQUATION.findall(re.sub(r" +", " ", text))
        if "=" in text and not found:
            return None
        equations += [(expression.strip(), number) for expression, number in found]
    return equations
