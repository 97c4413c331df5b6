"""Short worked solutions of generated problems, for the supervised warm start.

Every solution is computed step by step from the problem and compared with its answer, so that each line is
right, and is worded in one of many ways: a model that has seen a single wording has no entropy left to
explore with.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable
from fractions import Fraction

from reasoning_gym.arithmetic.leg_counting import ANIMALS

from dapo_pl.data.generated import GeneratedProblems, Item, exact_value, stated_equations
from dapo_pl.data.sources import Message, PromptSource, fill_template
from dapo_pl.errors import UserError

Solution = tuple[list[str], int]
"""The steps, each "left = right" or a remark, and the answer they arrive at."""

OPENINGS = ("", "", "", "Step by step:", "Let's see.", "Solution:", "We compute:")

MAX_EQUATIONS = 4
"""A word problem with a longer solution is left out: worked examples are to stay below about 60 tokens."""


def worked_example(task: str, item: Item, rng: random.Random, style: str | None = None) -> str | None:
    """A worked solution of a reasoning-gym item whose last line is `Answer: <integer>`.

    Args:
        task: reasoning-gym's name of the task.
        item: the item, with `question`, `answer` and `metadata`.
        rng: chooses method and wording.
        style: the task's style of question (`generated.STYLES`); `short` gives bare equations without
            spaces, in one wording.

    Returns:
        The solution, or None for an item without a clean short one (a `gsm_symbolic` item whose own worded
            solution cannot be followed, an expression that passes through fractions).

    Raises:
        UserError: there are no worked examples for this task.
        ValueError: the steps do not arrive at the item's answer.
    """
    if task not in SOLVERS:
        raise UserError(f"data.tasks.{task}: no worked examples; only for {', '.join(sorted(SOLVERS))}.")
    solution = SOLVERS[task](item, rng)
    if solution is None:
        return None
    steps, answer = solution
    if answer != int(item["answer"]):
        raise ValueError(f"{task}: {steps} arrive at {answer}, the answer is {item['answer']}: {item['question']}")
    if style == "short":
        return "\n".join([*(step.replace(" ", "") for step in steps), f"Answer: {answer}"])
    return "\n".join([*_worded(steps, rng), f"Answer: {answer}"])


def warm_start_examples(
    source: PromptSource, size: int, seed: int, direct_share: float = 0.0
) -> list[tuple[list[Message], str]]:
    """(prompt messages, worked response) pairs in the source's mix of tasks, none of them among its training
    or evaluation problems. Where a task has few problems they come again, mostly in other words.

    Args:
        source: the problems.
        size: pairs.
        seed: of their choice and wording.
        direct_share: share of the responses that state the answer at once, without steps. A model warm-started
            on both has two ways of answering, and reinforcement learning finds out which one pays.

    Raises:
        UserError: the source does not generate its problems, or one of its tasks has no worked examples.
    """
    if not isinstance(source, GeneratedProblems):
        raise UserError(
            "worked examples exist for generated problems only: set data=word_problems, or warm_start=none."
        )
    rng = random.Random(f"worked examples {seed}")

    def usable(task: str, item: Item) -> bool:
        return worked_example(task, item, random.Random(0)) is not None

    examples = []
    for task, item in source.draw("warm_start", size, seed, usable=usable, distinct=False):
        response = worked_example(task, item, rng, source.style(task))
        assert response is not None  # usable
        if direct_share and rng.random() < direct_share:
            response = response.rpartition("\n")[2]
        examples.append((fill_template(source.template, item["question"]), response))
    return examples


def _worded(steps: list[str], rng: random.Random) -> list[str]:
    """The steps as lines, in one of several voices, with or without an opening line."""
    opening = rng.choice(OPENINGS)
    # the wordy ones would make long solutions too long
    voice = rng.choice(("plain", "sentences", "so", "one line", *(("numbered", "then") if len(steps) <= 3 else ())))
    if voice == "sentences":
        lines = [f"{step}." for step in steps]
    elif voice == "numbered":
        lines = [f"Step {number}: {step}" for number, step in enumerate(steps, start=1)]
    elif voice == "then":
        lines = [f"{'First' if number == 0 else 'Then'} {step}." for number, step in enumerate(steps)]
    elif voice == "so":
        lines = [*steps[:-1], *(f"So {step}." for step in steps[-1:])]
    elif voice == "one line":
        lines = ["; ".join(steps)] if steps else []
    else:
        lines = steps
    return [opening, *lines] if opening else lines


def _chain_sum(item: Item, rng: random.Random) -> Solution:
    first, *rest = item["metadata"]["expression"].split(" ")
    total, steps = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        steps.append(f"{total} {operator} {term} = {result}")
        total = result
    return steps, total


def _basic_arithmetic(item: Item, rng: random.Random) -> Solution | None:
    steps: list[str] = []
    symbols: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

    def shown(value: Fraction) -> str:
        return f"({value})" if value < 0 else str(value)

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            if not isinstance(node.operand, ast.Constant):
                steps.append(f"-({inner}) = {-inner}")
            return -inner
        if not isinstance(node, ast.BinOp):
            return Fraction(ast.literal_eval(node))
        left, right = value(node.left), value(node.right)
        step = f"{left} {symbols[type(node.op)]} {shown(right)}"
        result = exact_value(step)
        steps.append(f"{step} = {result}")
        return result

    answer = value(ast.parse(item["metadata"]["expression"].strip(), mode="eval").body)
    if any("/" in step.split("=")[1] for step in steps):
        return None  # passes through a fraction
    return steps, int(answer)


def _leg_counting(item: Item, rng: random.Random) -> Solution:
    wording = rng.choice(
        ("{how_many} {have} {legs} legs", "{how_many}: {legs}", "{name}: {legs}", "{legs}", "{legs}")
    )
    steps, parts = [], []
    for animal, number in item["metadata"]["animals"].items():
        parts.append(number * ANIMALS[animal])
        steps.append(
            wording.format(
                how_many=f"{number} {animal}{'s' if number > 1 else ''}",
                name=animal,
                have="have" if number > 1 else "has",
                legs=f"{number} * {ANIMALS[animal]} = {parts[-1]}",
            )
        )
    if len(parts) > 2 and rng.random() < 0.5:
        total = parts[0]
        for part in parts[1:]:
            steps.append(f"{total} + {part} = {total + part}")
            total += part
    elif len(parts) > 1:
        steps.append(f"{' + '.join(map(str, parts))} = {sum(parts)}")
    return steps, sum(parts)


def _gcd(item: Item, rng: random.Random) -> Solution:
    numbers = item["metadata"]["numbers"]
    if rng.random() < 0.5:
        divisor = math.gcd(*numbers)
        quotients = [number // divisor for number in numbers]
        steps = [f"{number} = {divisor} * {quotient}" for number, quotient in zip(numbers, quotients, strict=True)]
        return [*steps, f"{' and '.join(map(str, quotients))} share no factor"], divisor
    as_product = rng.random() < 0.5
    steps, divisor = [], numbers[0]
    for number in numbers[1:]:
        large, small = max(divisor, number), min(divisor, number)
        while small:
            rest = large % small
            steps.append(
                f"{large} = {large // small} * {small} + {rest}" if as_product else f"{large} % {small} = {rest}"
            )
            large, small = small, rest
        divisor = large
    return steps, divisor


def _lcm(item: Item, rng: random.Random) -> Solution:
    numbers = item["metadata"]["numbers"]
    multiple, steps = numbers[0], []
    for number in numbers[1:]:
        large, small = max(multiple, number), min(multiple, number)
        multiple, divisor = math.lcm(large, small), math.gcd(large, small)
        if multiple // large <= 5 and rng.random() < 0.5:
            listed = ", ".join(map(str, range(large, multiple + 1, large)))
            steps += [f"multiples of {large}: {listed}", f"{multiple} / {small} = {multiple // small}"]
        else:
            steps += [f"gcd({large}, {small}) = {divisor}"]
            steps += [f"{large} / {divisor} = {large // divisor}"] if divisor > 1 else []
            steps += [f"{large // divisor} * {small} = {multiple}"]
    return steps, multiple


def _simple_equations(item: Item, rng: random.Random) -> Solution | None:
    variable = item["metadata"]["variable"]
    left, right = item["metadata"]["equation"].split(" = ")
    at_0, at_1 = (exact_value(left.replace(variable, f"({x})")) for x in (0, 1))
    constant, coefficient, target = int(at_0), int(at_1 - at_0), int(right)
    difference = target - constant
    if coefficient == 0:
        return None
    solution = difference // coefficient
    with_variable = rng.random() < 0.5
    steps = []
    if constant:
        factor = {1: "", -1: "-"}.get(coefficient, f"{coefficient}*")
        steps.append(
            (f"{factor}{variable} = " if with_variable else "")
            + f"{target} {'-' if constant > 0 else '+'} {abs(constant)} = {difference}"
        )
    if coefficient != 1:
        divisor = f"({coefficient})" if coefficient < 0 else coefficient
        steps.append((f"{variable} = " if with_variable else "") + f"{difference} / {divisor} = {solution}")
    return steps, solution


def _number_sequence(item: Item, rng: random.Random) -> Solution:
    rule, sequence = item["metadata"]["rule"], item["metadata"]["sequence"]
    before, value = sequence[-3:-1]
    steps = [rng.choice(("the rule: {}", "each time {}", "{}")).format(rule)]
    for part in rule.split(" then "):
        match part.split(" "):
            case ["add", "previous"]:
                step, result = f"{value} + {before}", value + before
            case ["add", number]:
                step, result = f"{value} + {number}", value + int(number)
            case ["multiply", "by", number]:
                step, result = f"{value} * {number}", value * int(number)
            case ["double"]:
                step, result = f"{value} * 2", value * 2
            case ["square"]:
                step, result = f"{value} * {value}", value * value
            case ["halve"]:
                step, result = f"{value} // 2", value // 2
            case _:
                raise ValueError(f"unknown rule of number_sequence: {rule!r}")
        steps.append(f"{step.replace('+ -', '- ')} = {result}")
        value = result
    return steps, value


def _gsm_symbolic(item: Item, rng: random.Random) -> Solution | None:
    equations = stated_equations(item["metadata"]["answer_cot"])
    if not equations or len(equations) > MAX_EQUATIONS or int(item["answer"]) != Fraction(equations[-1][1]):
        return None
    steps = []
    for expression, number in equations:
        if exact_value(expression) != Fraction(number):
            return None
        spaced = re.sub(r"(?<=[\d)]) ?([-+*/]) ?", r" \1 ", expression)
        steps.append(f"{spaced} = {number}")
    return steps, int(item["answer"])


SOLVERS: dict[str, Callable[[Item, random.Random], Solution | None]] = {
    "basic_arithmetic": _basic_arithmetic,
    "chain_sum": _chain_sum,
    "gcd": _gcd,
    "gsm_symbolic": _gsm_symbolic,
    "lcm": _lcm,
    "leg_counting": _leg_counting,
    "number_sequence": _number_sequence,
    "simple_equations": _simple_equations,
}
"""Steps and answer of an item, by task; None where no clean solution can be given."""
