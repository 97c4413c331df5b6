"""Generated problems, against an independent reading of each question."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest
from omegaconf import OmegaConf

from dapo_pl.data.generated import INTEGER_TASKS, GeneratedProblems, exact_value, stated_equations
from dapo_pl.errors import UserError

MIX = {
    "chain_sum": {"weight": 2, "max_terms": 3, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 4, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 3, "max_instances": 9},
    "gcd": {"min_value": 2, "max_value": 40, "max_numbers": 3},
    "lcm": {"min_value": 2, "max_value": 20},
    "simple_equations": {"max_terms": 3, "max_value": 12},
    "number_sequence": {"max_complexity": 1},
    "gsm_symbolic": {},
}

LEGS = {
    0: "snake,sea slug,jellyfish,flatworm,leech",
    2: "chicken,bird,human,duck",
    4: "dog,cat,cow,horse,lion,elephant,giraffe,tiger,deer,sheep",
    5: "starfish",
    6: "insect,ant,butterfly,beetle,bee,wasp,grasshopper,cricket,cockroach,praying mantis,firefly",
    8: "spider,scorpion",
    10: "crab,lobster,shrimp",
    14: "woodlouse",
}
LEGS_OF = {animal: legs for legs, animals in LEGS.items() for animal in animals.split(",")}


def python_value(expression: str) -> Fraction:
    """The expression's value by Python's own evaluation, in fractions."""
    assert re.fullmatch(r"[-+*/%().\d ]+", expression), expression
    return eval(re.sub(r"\d+(?:\.\d+)?", r"Fraction('\g<0>')", expression))


def solves(task: str, question: str, answer: int) -> bool:
    """Whether the answer is right, from the text of the question alone."""
    if task == "chain_sum":
        return python_value(question.split(":")[-1].removesuffix("=")) == answer
    if task == "basic_arithmetic":
        return python_value(question.removeprefix("Calculate ").removesuffix(".")) == answer
    if task in {"gcd", "lcm"}:
        numbers = map(int, re.findall(r"\d+", question))
        return (math.gcd if task == "gcd" else math.lcm)(*numbers) == answer
    if task == "simple_equations":
        equation = question.split(": ")[1]
        left, right = re.sub(r"[a-z]", f"({answer})", equation).split(" = ")
        return python_value(left) == python_value(right)
    if task == "leg_counting":
        animals = re.findall(r"(\d+) ([a-z ]+)", question.split("if you have ")[1])
        return answer == sum(
            int(number) * (LEGS_OF[name] if name in LEGS_OF else LEGS_OF[name.removesuffix("s")])
            for number, name in animals
        )
    return True  # number_sequence and gsm_symbolic are not unambiguous enough to solve here


@pytest.fixture(scope="module")
def source():
    return GeneratedProblems(MIX, train_size=900, evaluation_size=180)


@pytest.fixture(scope="module")
def train(source):
    return source.load("train")


@pytest.fixture(scope="module")
def evaluation(source):
    return source.load("evaluation")


def test_answers_are_right(train, evaluation):
    for row in [*train, *evaluation]:
        assert solves(row["source"], row["question"], row["answer"]), row


def test_prompt_is_the_template_with_the_question(train):
    for row in train:
        ((message),) = row["messages"]
        assert message["role"] == "user"
        assert message["content"].startswith(row["question"].strip() + "\n")
        assert message["content"].endswith("'Answer: <integer>'.")


def test_no_question_twice_and_none_in_both(train, evaluation):
    questions = [question.strip() for question in [*train["question"], *evaluation["question"]]]
    assert len(set(questions)) == 900 + 180
    assert len({*train["id"], *evaluation["id"]}) == 900 + 180


def test_shares_follow_the_weights(train):
    counts = Counter(train["source"])
    assert sum(counts.values()) == 900
    assert set(counts) == set(MIX)
    for task, number in counts.items():
        assert abs(number - 900 * MIX[task].get("weight", 1) / 9) < 1


def test_order_is_mixed(train):
    assert len(set(train["source"][:40])) > 4


def test_seeds(source, train, evaluation):
    other = GeneratedProblems(MIX, train_size=450, evaluation_size=180, seed=1)
    assert other.load("evaluation").to_list() == evaluation.to_list()
    assert len({*other.load("train")["question"]} & {*train["question"]}) < 225
    again = GeneratedProblems(MIX, train_size=900, evaluation_size=9, evaluation_seed=5)
    assert again.load("train").to_list() == train.to_list()
    assert again.load("evaluation")["question"] != evaluation["question"][:9]


def test_same_problems_in_another_process(train):
    code = (
        "from dapo_pl.data.generated import GeneratedProblems;"
        f"print(*GeneratedProblems({MIX!r}, 900, 180).load('train')['id'], sep='\\n')"
    )
    environment = os.environ | {"PYTHONHASHSEED": "123"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == train["id"]


def test_disjoint_where_questions_are_few():
    # "a + b" and "a - b" in one digit: 200 questions in all
    tiny = GeneratedProblems({"chain_sum": {"max_terms": 2, "max_digits": 1}}, train_size=80, evaluation_size=30)
    parts = [
        {item["question"] for _, item in tiny.draw("warm_start", 30, 0)},
        {*tiny.load("train")["question"]},
        {*tiny.load("evaluation")["question"]},
    ]
    assert [len(part) for part in parts] == [30, 80, 30]
    assert len(set.union(*parts)) == 140


def test_too_few_distinct_problems():
    tiny = GeneratedProblems({"chain_sum": {"max_terms": 2, "max_digits": 1}}, train_size=201, evaluation_size=1)
    with pytest.raises(
        UserError, match=r"data\.tasks\.chain_sum has only \d+ distinct problems for train, 201 are needed"
    ):
        tiny.load("train")
    repeated = tiny.draw("train", 201, 0, distinct=False)
    assert len(repeated) == 201
    assert len({item["question"] for _, item in repeated}) < 201


def test_short_style():
    tasks = {"chain_sum": {"style": "short", "min_terms": 2, "max_terms": 5, "max_digits": 1}}
    for row in (
        GeneratedProblems(tasks, train_size=100, evaluation_size=1, template="{question}").load("train").to_list()
    ):
        assert re.fullmatch(r"\d( [-+] \d){1,4} =", row["question"])
        assert row["messages"][0]["content"] == row["question"]
        assert python_value(row["question"].removesuffix("=")) == row["answer"]


def test_settings_from_omegaconf():
    tasks = OmegaConf.create({"basic_arithmetic": {"operators": ["+", "-"], "max_terms": 3}, "gcd": {"weight": 0}})
    rows = GeneratedProblems(tasks, train_size=50, evaluation_size=1).load("train")  # pyright: ignore[reportArgumentType]
    assert not any(set("*/") & set(question) for question in rows["question"])
    assert set(rows["source"]) == {"basic_arithmetic"}


def test_rounded_gsm_answers_are_left_out():
    # reasoning-gym's own solutions state rounded divisions as equations: "99 / 22 = 4"
    items = GeneratedProblems({"gsm_symbolic": {}}, train_size=600, evaluation_size=1).draw("train", 600, 0)
    checked = 0
    for _, item in items:
        for dividend, divisor, quotient in re.findall(
            r"(?<![\d.*/] )(?<![\d.])(\d+) / (\d+) = (\d+)\b(?!\.\d| ?[-+*/%])", item["metadata"]["answer_cot"]
        ):
            assert int(dividend) == int(divisor) * int(quotient), item
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("task", INTEGER_TASKS)
def test_every_known_task_with_its_default_settings(task):
    settings = {"max_complexity": 1} if task == "number_sequence" else {}
    rows = GeneratedProblems({task: settings}, train_size=40, evaluation_size=1).load("train").to_list()
    assert all(solves(task, row["question"], row["answer"]) for row in rows)


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ({"chain_summ": {}}, r"data\.tasks\.chain_summ: reasoning-gym has no such task; did you mean 'chain_sum'\?"),
        ({"gcd": None}, r"data\.tasks\.gcd is None, must be a mapping"),
        ({"gcd": {"max_vale": 3}}, r"data\.tasks\.gcd\.max_vale: no such setting; did you mean 'max_value'\?"),
        ({"gcd": {"seed": 3}}, r"data\.tasks\.gcd\.seed: no such setting"),
        ({"gcd": {"weight": -1}}, r"data\.tasks\.gcd\.weight is -1"),
        ({"gcd": {"weight": 0}}, "no task with a weight above 0"),
        ({}, "no task with a weight above 0"),
        ({"chain_sum": {"style": "shrt"}}, r"no style 'shrt'; did you mean 'short'\?"),
        ({"gcd": {"style": "short"}}, "no style 'short'; this task has none"),
    ],
)
def test_mistakes_in_the_mix(tasks, sentence):
    with pytest.raises(UserError, match=sentence):
        GeneratedProblems(tasks, train_size=1, evaluation_size=1)


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (
            {"leg_counting": {"max_animals": 99}},
            r"data\.tasks\.leg_counting: reasoning-gym fails .*available animals",
        ),
        ({"simple_equations": {"operators": ["+"]}}, r"data\.tasks\.simple_equations: reasoning-gym fails"),
        ({"countdown": {}}, r"data\.tasks\.countdown is refused: the answer .* is no integer \(row \d"),
        ({"calendar_arithmetic": {}}, r"data\.tasks\.calendar_arithmetic is refused: .* no integer \(row \d"),
        # reasoning-gym evaluates these from left to right: 50 + 83 * 6 is 798 to it
        ({"basic_arithmetic": {"allow_parentheses": False}}, "is not the value of the expression"),
        (
            {
                "basic_arithmetic": {
                    "min_terms": 9,
                    "max_terms": 9,
                    "min_digits": 9,
                    "max_digits": 9,
                    "operators": ["*"],
                }
            },
            "64 bits",
        ),
    ],
)
def test_mistakes_that_show_when_drawing(tasks, sentence):
    with pytest.raises(UserError, match=sentence):
        GeneratedProblems(tasks, train_size=50, evaluation_size=1).load("train")


def test_sizes():
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match=r"data\.\w+_size is 0, must be at least 1"):
            GeneratedProblems(MIX, *sizes)


def test_exact_value():
    assert exact_value(" -( 3 + 4 ) * 2 / 7 ") == -2
    assert exact_value("1 / 3 - 0.5") == Fraction(-1, 6)
    with pytest.raises(ZeroDivisionError):
        exact_value("1 / (2 - 2)")
    for other in ("2 ** 3", "x + 1", "abs(3)", "'3'"):
        with pytest.raises(ValueError, match="no arithmetic expression"):
            exact_value(other)


@pytest.mark.parametrize(
    ("text", "equations"),
    [
        ("So 28 batches * 9 minutes/batch = 252 minutes\n#### 252", [("28 * 9", "252")]),
        ("It is $410,000 x 7/100 = $28,700.", [("410000 * 7/100", "28700")]),
        ("  • so 35 × 3 = 105 kiwi", [("35 * 3", "105")]),
        ("Ava is 71+28 = 99 years. The sum is 99+71 = 170.", [("71+28", "99"), ("99+71", "170")]),
        ("She eats 13 x 2 = 26.0 eggs", [("13 * 2", "26")]),
        ("A remark without any.", []),
        ("Let x be what Tom gets: x + y = 154", None),
    ],
)
def test_stated_equations(text, equations):
    assert stated_equations(text) == equations
