"""Worked examples: every line is evaluated here, independently of the code that wrote it."""

import math
import random
import re
from fractions import Fraction

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from dapo_pl.data.generated import GeneratedProblems
from dapo_pl.data.problem_files import ProblemFile
from dapo_pl.data.worked_examples import SOLVERS, warm_start_examples, worked_example
from dapo_pl.errors import UserError
from dapo_pl.grading import extract_answer

SETTINGS = {
    "chain_sum": {"max_terms": 4, "max_digits": 3, "allow_negation": True},
    "basic_arithmetic": {"max_terms": 4, "max_digits": 2, "operators": ["+", "-", "*"]},
    "leg_counting": {"min_animals": 1, "max_animals": 4},
    "gcd": {"max_numbers": 3, "max_value": 60},
    "lcm": {"max_numbers": 3, "max_value": 30},
    "simple_equations": {"max_value": 20},
    "number_sequence": {"max_complexity": 2},
    "gsm_symbolic": {},
}


def python_value(expression: str) -> Fraction:
    assert re.fullmatch(r"[-+*/%().\d ]+", expression), expression
    return eval(re.sub(r"\d+(?:\.\d+)?", r"Fraction('\g<0>')", expression))


def checked_equations(response: str) -> int:
    """Evaluate every equation and list of multiples in the response; how many there were."""
    checked = 0
    for fragment in re.split(r"\n|; ", response):
        fragment = fragment.rstrip(".")
        if match := re.search(r"gcd\((\d+), (\d+)\) = (\d+)$", fragment):
            assert math.gcd(int(match[1]), int(match[2])) == int(match[3])
            checked += 1
        elif match := re.search(r"multiples of (\d+): (.*)$", fragment):
            multiples = [int(number) for number in match[2].split(", ")]
            assert multiples == [int(match[1]) * n for n in range(1, len(multiples) + 1)]
        elif match := re.search(r"(.*) share no factor$", fragment):
            assert math.gcd(*map(int, re.findall(r"\d+", match[1]))) == 1
        elif "=" in fragment:
            first, *middle, last = (side.strip() for side in fragment.split("="))
            sides = [*middle, re.sub(r" legs$", "", last)]
            if not re.fullmatch(r".*[a-z]", first):  # "3*x", "x": the unknown
                match = re.search(r"[-\d(][-+*/%().\d ]*$", first)
                assert match, fragment
                sides.append(match[0])
            assert len(sides) > 1, fragment
            assert len({python_value(side) for side in sides}) == 1, fragment
            checked += 1
    return checked


@pytest.mark.parametrize("task", SETTINGS)
def test_every_line_is_right_and_the_last_is_the_answer(task):
    rng = random.Random(0)
    written = 0
    for item in reasoning_gym.create_dataset(task, size=300, seed=11, **SETTINGS[task]):
        if "." in item["answer"]:
            continue
        response = worked_example(task, item, rng)
        if response is None:
            continue
        written += 1
        assert response.split("\n")[-1] == f"Answer: {item['answer']}"
        assert response.count("Answer:") == 1
        assert extract_answer(response) == int(item["answer"])
        equations = checked_equations(response)
        assert equations or task in {"basic_arithmetic", "simple_equations", "gcd"}, response
    assert written > (150 if task == "gsm_symbolic" else 290)


@pytest.mark.parametrize("task", SETTINGS)
def test_wording_varies(task):
    item = next(
        item
        for item in reasoning_gym.create_dataset(task, size=50, seed=3, **SETTINGS[task])
        if worked_example(task, item, random.Random(0))
    )
    wordings = {worked_example(task, item, random.Random(seed)) for seed in range(100)}
    assert len(wordings) >= 15


def test_same_random_state_same_example():
    item = reasoning_gym.create_dataset("gcd", size=1, seed=3)[0]
    assert worked_example("gcd", item, random.Random(4)) == worked_example("gcd", item, random.Random(4))


def test_chain_sum_by_hand():
    item = {"question": "4 + 3 - 2 =", "answer": "5", "metadata": {"expression": "4 + 3 - 2"}}
    assert worked_example("chain_sum", item, random.Random(0), "short") == "4+3=7\n7-2=5\nAnswer: 5"
    all_wordings = {worked_example("chain_sum", item, random.Random(seed)) for seed in range(200)}
    assert "4 + 3 = 7\n7 - 2 = 5\nAnswer: 5" in all_wordings


def test_number_sequence_by_hand():
    metadata = {"rule": "halve then add -3 then add previous then square", "sequence": [1, 2, 9, 9]}
    item = {"question": "1, 2, 9, ?", "answer": "9", "metadata": metadata}
    response = worked_example("number_sequence", item, random.Random(0))
    assert response is not None
    assert re.findall(r"[-\d]+ .{1,2} [-\d]+ = [-\d]+", response) == [
        "9 // 2 = 4",
        "4 - 3 = 1",
        "1 + 2 = 3",
        "3 * 3 = 9",
    ]


@given(st.lists(st.tuples(st.sampled_from("+-"), st.integers(-999, 999)), max_size=6), st.integers(-999, 999))
def test_any_chain_sum(rest, first):
    expression = " ".join([str(first), *(f"{operator} {term}" for operator, term in rest)])
    answer = first + sum(term if operator == "+" else -term for operator, term in rest)
    item = {"question": expression, "answer": str(answer), "metadata": {"expression": expression}}
    for style in (None, "short"):
        response = worked_example("chain_sum", item, random.Random(0), style)
        assert response is not None
        assert checked_equations(response) == len(rest) or "; " in response
        assert extract_answer(response) == answer


@given(st.integers(-50, 50).filter(bool), st.integers(-99, 99), st.integers(-99, 99))
def test_any_linear_equation(coefficient, constant, solution):
    equation = f"{coefficient}*x + {constant} = {coefficient * solution + constant}"
    item = {"question": equation, "answer": str(solution), "metadata": {"equation": equation, "variable": "x"}}
    for seed in range(3):
        response = worked_example("simple_equations", item, random.Random(seed))
        assert response is not None
        checked_equations(response)
        assert extract_answer(response) == solution


@given(st.lists(st.integers(1, 500), min_size=2, max_size=4), st.integers(0, 20))
def test_any_gcd_and_lcm(numbers, seed):
    for task, result in (("gcd", math.gcd(*numbers)), ("lcm", math.lcm(*numbers))):
        item = {"question": "", "answer": str(result), "metadata": {"numbers": numbers}}
        response = worked_example(task, item, random.Random(seed))
        assert response is not None
        checked_equations(response)
        assert extract_answer(response) == result


def test_wrong_answer_is_noticed():
    item = {"question": "4 + 3 =", "answer": "8", "metadata": {"expression": "4 + 3"}}
    with pytest.raises(ValueError, match="arrive at 7, the answer is 8"):
        worked_example("chain_sum", item, random.Random(0))


def test_gsm_solution_that_cannot_be_followed():
    for solution in ("Let x + y = 154", "99 / 22 = 4", "8 - 1 = 7", ""):
        item = {"question": "", "answer": "4", "metadata": {"answer_cot": solution}}
        assert worked_example("gsm_symbolic", item, random.Random(0)) is None


class TestWarmStart:
    def test_pairs(self):
        source = GeneratedProblems(SETTINGS, train_size=200, evaluation_size=50)
        examples = warm_start_examples(source, size=160, seed=0)
        assert len(examples) == 160
        taken = {
            row["messages"][0]["content"] for split in ("train", "evaluation") for row in source.load(split).to_list()
        }
        prompts = [messages[0]["content"] for messages, _ in examples]
        assert not taken & set(prompts)
        assert len(set(prompts)) > 150
        for _, response in examples:
            checked_equations(response)
            assert extract_answer(response) == int(response.split("Answer: ")[1])
        assert examples == warm_start_examples(source, size=160, seed=0)
        assert examples != warm_start_examples(source, size=160, seed=1)

    def test_short_chain_sums_for_a_tiny_model(self):
        tasks = {"chain_sum": {"style": "short", "max_terms": 5, "max_digits": 1}}
        source = GeneratedProblems(tasks, train_size=1, evaluation_size=1, template="{question}")
        for messages, response in warm_start_examples(source, size=200, seed=0):
            question = messages[0]["content"].removesuffix("=")
            assert python_value(question) == extract_answer(response)
            assert response.count("\n") == len(re.findall(r" [-+] ", question))
            assert set(response) <= set("0123456789+-=\nAnswer: ")
            assert checked_equations(response)

    def test_small_tasks_repeat_their_problems_in_other_words(self):
        source = GeneratedProblems({"chain_sum": {"max_terms": 2, "max_digits": 1}}, train_size=1, evaluation_size=1)
        examples = warm_start_examples(source, size=300, seed=0)
        assert len({messages[0]["content"] for messages, _ in examples}) < 60
        assert len({(messages[0]["content"], response) for messages, response in examples}) > 150

    def test_refusals(self):
        with pytest.raises(UserError, match="for generated problems only"):
            warm_start_examples(ProblemFile("p.jsonl"), size=1, seed=0)
        with pytest.raises(UserError, match=r"data\.tasks\.products: no worked examples; only for basic_arithmetic"):
            warm_start_examples(GeneratedProblems({"products": {}}, train_size=1, evaluation_size=1), size=1, seed=0)

    def test_every_solver_is_tested(self):
        assert set(SOLVERS) == set(SETTINGS)


def test_a_share_of_the_examples_states_the_answer_at_once():
    source = GeneratedProblems({"chain_sum": {"style": "short"}}, train_size=1, evaluation_size=1)
    worked = warm_start_examples(source, 400, seed=3)
    assert all("\n" in response for _, response in worked)
    mixed = warm_start_examples(source, 400, seed=3, direct_share=0.25)
    direct = [response for _, response in mixed if "\n" not in response]
    assert 70 <= len(direct) <= 130  # 100 expected, standard deviation 8.7
    for (messages, response), (same, whole) in zip(mixed, worked, strict=True):
        assert messages == same
        assert whole.endswith(response)
    assert all("\n" not in response for _, response in warm_start_examples(source, 20, seed=3, direct_share=1))
