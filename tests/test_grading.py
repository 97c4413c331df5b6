"""Grading against a truth table written by others, solutions labelled by others, and more of each kind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_pl.grading import extract_answer, is_correct, parse_integer_answer

SHARED = Path(__file__).parents[2] / "shared"
TABLE = SHARED / "oracles" / "answer_grading.jsonl"


def rows() -> list[dict]:
    return [json.loads(line) for line in TABLE.read_text().splitlines()] if TABLE.exists() else []


@pytest.mark.skipif(not TABLE.exists(), reason="the truth table is not here")
@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['kind']}: {row['response'][-20:]!r}")
def test_truth_table(row: dict) -> None:
    assert is_correct(row["response"], row["answer"]) == row["correct"]


# More of the truth table's kinds: what stands behind "Answer: ", and the integer it states.
STATEMENTS: dict[str, dict[str, int | None]] = {
    "latex": {
        "$$42$$": 42,
        "\\[42\\]": 42,
        "$$\\boxed{42}$$": 42,
        "\\[ \\boxed{42} \\]": 42,
        "$\\mathbf{42}$": 42,
        "\\(\\mathrm{42}\\)": 42,
        "\\textbf{42}": 42,
        "\\textbf{\\text{42}}": 42,
        "\\boldsymbol{42}": 42,
        "{\\bf 42}": 42,
        "\\displaystyle 42": 42,
        "\\left(42\\right)": 42,
        "\\textcolor{red}{42}": 42,
        "$\\,42\\,$": 42,
        "\\dfrac{84}{2}": None,
        "\\tfrac{42}{1}": None,
        "\\frac421": None,
        "\\sqrt{1764}": None,
        "\\binom{9}{2}": None,
        "\\overline{42}": None,
        "42\\overline{3}": None,
        "42\\pi": None,
        "\\lfloor 42.5 \\rfloor": None,
        "4\\,2": None,
        "4\\text{2}": None,
        "42_{10}": None,
        "101010_2": None,
    },
    "markdown": {
        "*42*": 42,
        "__42__": 42,
        "***42***": 42,
        "**$42$**.": 42,
        "**42** apples": 42,
        "<b>42</b>": 42,
        "“42”": 42,
        "(42)": 42,
        "[42]": 42,
        "#42": 42,
        "42 ✅": 42,
        "4**2**": None,
        "10**3": None,
    },
    "full stop": {
        "**42**.": 42,
        "42 .": 42,
        "42。": 42,
        "42. I hope it is correct.": 42,
        "42, because it is.": 42,
        "42 (forty-two)": 42,
        "42 — which was to be shown": 42,
        "42...": None,
        "42…": None,
        "42 (not 41)": None,
        "42. No, 41.": None,
    },
    "thousands": {
        "12,345,678": 12345678,
        "$1{,}000{,}000$": 1000000,
        "1{\\,}000": 1000,
        "1,\\!000": 1000,
        "1\\;000": 1000,
        "1\\ 000\\ 000": 1000000,
        "1\u2009000": 1000,
        "1\u202f000": 1000,
        "1\u00a0000": 1000,
        "1 000 000": 1000000,
        "1_000": 1000,
        "1'000": 1000,
        "1’000": 1000,
        "１，０００": 1000,
        "1,000.00": 1000,
        "1,000.": 1000,
        "−1,000,000": -1000000,
        "1,0000": None,
        "10,00": None,
        "1,000,00": None,
        "1234,567": None,
        "0,100": None,
        ",100": None,
        "1, 000": None,
        "1.000.000": None,
        "1.000,00": None,
        "1,000.50": None,
        "1 00": None,
        "1\u00a000": None,
        "1000 1": None,
    },
    "sign": {
        "− 7": -7,
        "- 7": -7,
        "+ 7": 7,
        "–7": -7,
        "－7": -7,
        "$-$7": -7,
        "-\\!7": -7,
        "-$7": -7,
        "\\$-7": -7,
        "-\\boxed{7}": -7,
        "-0": 0,
        "-007": -7,
        "--7": None,
        "+-7": None,
        "±7": None,
        "\\pm 7": None,
        "7-": None,
        "3 − 10": None,
        "3–7": None,
        "minus 7": None,
    },
    "zeros": {"0": 0, "000": 0, "0042": 42},
    "decimal": {
        "42.00": 42,
        "42.000": 42,
        "1.000": 1,
        "-42.0": -42,
        "42.0.": 42,
        "$42.00": 42,
        "42.01": None,
        ".42": None,
        "42,50": None,
        "42.0.0": None,
        "42.5 cm": None,
        "4.2e1": None,
        "42½": None,
        "3 1/2": None,
    },
    "unit": {
        "42cm": 42,
        "42 cm^2": 42,
        "42 cm^{2}": 42,
        "42 cm²": 42,
        "42\\text{ cm}^2": 42,
        "42\\,\\mathrm{cm}": 42,
        "42~\\text{cm}": 42,
        "42 m": 42,
        "42 km/h": 42,
        "42 \\text{ m/s}^2": 42,
        "42 miles per hour": 42,
        "42 square units.": 42,
        "42 sq. ft.": 42,
        "42-year-old": 42,
        "42 times": 42,
        "42°": 42,
        "42^{\\circ}": 42,
        "42\\degree": 42,
        "42 °C": 42,
        "42%": 42,
        "$42\\%$": 42,
        "42nd": 42,
        "42^{\\text{nd}}": 42,
        "$42": 42,
        "$\\$42$": 42,
        "\\$1,000": 1000,
        "€42": 42,
        "42 €": 42,
        "US$42": 42,
        "42 dollars": 42,
        "42x": None,
        "42 x": None,
        "42n": None,
        "42xy": None,
        "42k": None,
        "42M": None,
        "42 thousand": None,
        "42 million": None,
        "42 dozen": None,
        "42 and a half": None,
        "42 days 3 hours": None,
        "5'11": None,
        "3:30": None,
    },
    "equation": {
        "x=42.": 42,
        "\\( x = 42 \\)": 42,
        "$x$ = **42**": 42,
        "\\boxed{x = 42}": 42,
        "x = \\boxed{42}": 42,
        "x = y = 42": 42,
        "x=-42": -42,
        "f(1, 2) = 42": 42,
        "2 \\cdot (3 + (4 + 14)) = 42": 42,
        "\\frac{84}{2} = 42": 42,
        "10^3 = 1,000": 1000,
        "|x| = 42 cm": 42,
        "x = 40 + 2": None,
        "42 = x": None,
        "x =": None,
        "x = 41, y = 42": None,
        "x = 41,y = 42": None,
        "x = 41 \\text{ or } x = 42": None,
        "x = 41 \\lor x = 42": None,
        "x = 41 and y = 42": None,
        "x = 41 \\quad y = 42": None,
        "42 (as 40 + 3 = 43)": None,
        "42. Check: 40 + 3 = 43": None,
        "x \\le 42": None,
        "x <= 42": None,
        "x \\neq 42": None,
        "x != 42": None,
        "x ≈ 42": None,
        "x \\equiv 42 \\pmod{100}": None,
    },
    "several numbers": {
        "41 and 42": None,
        "41 & 42": None,
        "41; 42": None,
        "\\{41, 42\\}": None,
        "[41, 42]": None,
        "41 42": None,
        "41 (or 42)": None,
        "41 to 42": None,
        "42 or forty-three": None,
        "\\boxed{41} or \\boxed{42}": None,
        "$\\boxed{41}$, $\\boxed{42}$": None,
    },
    "words": {"forty two": None, "four 2": None, "about 42": None, "at least 42": None, "The answer is $42$.": 42},
    "prompt echoed": {"<integer>": None, "[answer]": None, "$Answer (without quotes)": None, "Answer: 42": 42},
    "special token": {
        "42</s>": 42,
        "$42$.<|im_end|>\n": 42,
        "42<|im_end|>\n<|im_start|>user": 42,
        "42<｜end▁of▁sentence｜>": 42,
        "42<end_of_turn>": 42,
        "<|im_end|>": None,
        "4<|x|>2": 4,
    },
    "line ends": {"42\r": 42, "42\u2028": 42, "42\x00": 42, "42\u200b": 42, "42\n\nThat is all, in 3 lines.": 42},
    "next line": {"\n\n42": 42, "\r\n42\r\n": 42, "\n$$\n42\n$$": 42, "\n```\n42\n```": 42, "\n\n\\boxed{42}": 42},
    "other digits": {"４２": 42, "٤٢": None, "④②": None, "⁴²": None, "42²": None, "Ⅻ": None},
    "expression": {
        "6*7": None,
        "6 * 7": None,
        "6 x 7": None,
        "6×7": None,
        "2·21": None,
        "6 \\times 7": None,
        "84÷2": None,
        "84 / 2": None,
        "40+2": None,
        "42!": None,
        "10^{3}": None,
        "6(7)": None,
        "(6)(7)": None,
        "42 + C": None,
        "42 mod 100": None,
        "1e3": None,
        "0x2A": None,
        "__import__('os').system('true')": None,
    },
}

RESPONSES: dict[str, int | None] = {
    "**Answer**: 42": 42,
    "__Answer:__ 42": 42,
    "**Answer: 42**": 42,
    "**Final Answer:** $\\boxed{42}$": 42,
    "Final Answer: The final answer is $42$. I hope it is correct.": 42,
    "\\textbf{Answer:} 42": 42,
    "\\text{ Answer }: 42": 42,
    "\\boxed{\\text{Answer: }42}": 42,
    "> ANSWER : 42": 42,
    "Answer： ４２": 42,
    "Answer:\u00a042": 42,
    "<b>Answer:</b> 42": 42,
    "Answers: 42": None,
    "Answer 42": None,
    "The answer is 42.": None,
    "It is **42**.": None,
    "Answer: 42\nAnswer:": 42,
    "Answer: 42\nAnswer:\n\n**Answer:**\n": 42,
    "Answer: 41. No. Answer: 42": 42,
    "Answer: 42\nAnswer: unknown": None,
    "Answer: 41\nSo \\boxed{42}.": 42,
    "Answer: it is 41 and 1 more, so \\boxed{42}": 42,
    "Answer: \\boxed{42": None,
    "\\boxed{41}, then \\boxed{42}": 42,
    "\\boxed{42} \\boxed{}": 42,
    "\\boxed{42} and \\boxed{4": 42,
    "\\boxed{41} and \\boxed{42}": None,
    "\\boxed{\\boxed{42}}": 42,
    "\\boxed {42}": 42,
    "\\fbox{42}": 42,
    "\\boxed{42}}": 42,
    "\\boxed{\n42\n}": 42,
    "\\boxed{42\\ \\text{cm}}": 42,
    "\\boxed{\\text{A}}": None,
    "\\boxed{6 \\times 7}": None,
    "İİİ\nAnswer: 42": 42,
    "Answer: " + " " * 5000 + "42": 42,
    "Answer: 42" + "\nAnswer:" * 5000: 42,
    "Answer: " + "so " * 500 + "42": None,
}


@pytest.mark.parametrize(
    ("statement", "stated"),
    [pytest.param(*row, id=f"{kind}: {row[0]!a}") for kind, table in STATEMENTS.items() for row in table.items()],
)
def test_statements(statement: str, stated: int | None) -> None:
    assert extract_answer(f"We add the two parts.\nAnswer: {statement}") == stated


@pytest.mark.parametrize(("response", "stated"), RESPONSES.items(), ids=lambda value: ascii(value)[:40])
def test_responses(response: str, stated: int | None) -> None:
    assert extract_answer(response) == stated


def test_the_marker_can_be_chosen() -> None:
    solution = "It is 9 a day: Anna has 2, and 9 * 2 = 18.\nA: 18"
    assert extract_answer(solution, marker="A") == 18
    assert extract_answer(solution) is None
    assert extract_answer("(x): 18", marker="(x)") == 18
    assert extract_answer("Answer: 7\nData: 18", marker="A") is None


WRAPPINGS = [
    "Answer: {}",
    "so\n\nAnswer: {}.",
    "Answer: ${}$",
    "Answer: \\({}\\)",
    "Answer: \\boxed{{{}}}",
    "It is $\\boxed{{{}}}$.",
    "$$\\boxed{{\\text{{{}}}}}$$",
    "**Answer:** **{}**",
    "Answer: `{}`",
    "Answer: \\text{{{}}}",
    "Answer: \\mathbf{{{}}}^\\circ",
    "Answer: x = {}",
    "Answer: $m + n = 1 + 2 = {}$",
    "Answer:\n{}\n",
    "Answer: {} apples",
    "Answer: {} cm^2.",
    "Answer: \\${}.00",
    "Answer: {}<|im_end|>",
    "Answer: 5\nAnswer: {}",
]
SEPARATORS = ["", ",", "{,}", "\\,", ",\\!", "\u2009", "\u202f", "_"]


@given(st.integers(-(10**30), 10**30), st.sampled_from(WRAPPINGS), st.sampled_from(SEPARATORS), st.data())
def test_wrapped_integers_come_back_and_no_other_is_accepted(
    value: int, wrapping: str, separator: str, data: st.DataObject
) -> None:
    response = wrapping.format(f"{value:,}".replace(",", separator))
    assert extract_answer(response) == value
    assert is_correct(response, value)
    assert is_correct(response, f"{value:,}")
    text = str(value)
    others = st.integers(-(10**6), 10**6) | st.sampled_from(
        [-value, value + 1, value * 10, int(text[-1]), int(text[-3:])]
    )
    other = data.draw(others)
    assert is_correct(response, other) == (other == value)


NUMBERS = st.integers(0, 10**6).map(str)


@given(NUMBERS, st.sampled_from([" + ", "-", "*", " \\cdot ", "/", "^", " or ", ", ", "; ", "e", ".5", ":"]), NUMBERS)
def test_two_numbers_are_no_answer(left: str, joint: str, right: str) -> None:
    for wrapping in ("Answer: {}", "\\boxed{{{}}}", "Answer: ${}$", "Answer: x = {}"):
        assert extract_answer(wrapping.format(left + joint + right)) is None


PIECES = ["Answer", ":", "\\boxed", "\\text", "{", "}", "$", "(", ")", "\\", ",", ".", "-", "*", "_", "^", "=", "or"]
PIECES += [" ", "\n", "0", "42", "000", "x", "é", "²", "，", "４", "<|", "|>", "İ", "\ud800", "\x00"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_never_raises(text: str) -> None:
    extract_answer(text)
    is_correct("Answer: " + text, text)


@given(st.text(max_size=200))
def test_never_raises_on_any_text(text: str) -> None:
    extract_answer("Answer: " + text)
    extract_answer("\\boxed{" + text)
    parse_integer_answer(text)


@pytest.mark.parametrize("length", [4300, 4301, 6000, 20_001])
def test_more_digits_than_int_reads(length: int) -> None:
    digits = "7" * length
    value = 7 * (10**length - 1) // 9
    assert extract_answer(f"Answer: ${digits}$") == value
    assert is_correct(f"\\boxed{{-{digits}}}", "-" + digits)
    assert is_correct(f"Answer: {digits}", value)
    assert not is_correct(f"Answer: {digits}", digits + "7")
    assert not is_correct(f"Answer: {digits}", digits[:-1])
    assert not is_correct(f"Answer: {digits}", 7)


def repeated(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda length: before + unit * (length // len(unit)) + after


HOSTILE = {
    "digits": repeated("9", "Answer: "),
    "digits in a box": repeated("9", "\\boxed{", "}"),
    "digits in wrappers": lambda length: "Answer: " + "\\text{" * 140 + "9" * length + "}" * 140,
    "digits in parentheses": lambda length: "Answer: " + "(" * 400 + "9" * length + ")" * 400,
    "full-width digits": repeated("９", "Answer: "),
    "groups of digits": repeated(",000", "Answer: 1"),
    "commas": repeated(",", "Answer: "),
    "commas and digits": repeated("1,", "Answer: "),
    "markers": repeated("Answer:"),
    "marker lines": repeated("Answer:\n"),
    "markers without colon": repeated("answer "),
    "markers and stars": repeated("Answer" + "*" * 17),
    "markers and boxes": repeated("Answer:\\boxed{"),
    "open boxes": repeated("\\boxed{"),
    "empty boxes": repeated("\\boxed{}", "Answer: 42"),
    "boxes": repeated("\\boxed{1} or ", "", "\\boxed{2}"),
    "nested boxes": lambda length: "\\boxed{" * (length // 8) + "42" + "}" * (length // 8),
    "braces": lambda length: "\\boxed{" + "{" * (length // 2) + "}" * (length // 2),
    "pairs of braces": repeated("{}", "\\boxed{"),
    "spaces": repeated(" ", "Answer: ", "x"),
    "spaces before a colon": repeated(" ", "Answer", ": 42"),
    "spaces between boxes": repeated(" ", "\\boxed{1}", "\\boxed{2}"),
    "line ends": repeated("\r\n", "Answer:", "42"),
    "stars": repeated("*", "", "Answer: 42"),
    "stars behind": repeated("*", "Answer: 42"),
    "dollars": repeated("$", "Answer: ", "42"),
    "backslashes": repeated("\\", "Answer: "),
    "equals": repeated("x = ", "Answer: ", "42"),
    "parentheses": repeated("(", "Answer: ", " = 42"),
    "letters": repeated(" a", "Answer: 42"),
    "one word": repeated("a", "Answer: 42 ", "!"),
    "remark": repeated(")", "Answer: 42, ", "1"),
    "special tokens": repeated("<|a|>", "Answer: "),
    "open special tokens": repeated("<|"),
    "accents": repeated("é", "Answer: 42 "),
}


def seconds(text: str) -> float:
    """The best of three, since other programs run beside the tests."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        extract_answer(text)
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize("kind", HOSTILE)
def test_work_does_not_grow_quadratically(kind: str) -> None:
    """Eight times the text: linear work takes 8 times as long, that of multiplying long digits 27, quadratic 64."""
    extract_answer("Answer: 42")
    small, large = seconds(HOSTILE[kind](25_000)), seconds(HOSTILE[kind](200_000))
    assert large < 0.2
    assert large < 40 * small or large < 0.003


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 42 " + "a" * 900 + "!",
        "Answer: 42 " + "a-" * 450 + "!",
        "Answer: 42, " + ")" * 900 + "5",
        "Answer: " + "100 " * 240 + "1",
        "Answer: " + "1)" * 450 + " = 42",
        "Answer: " + "^ " * 450 + "4",
        "Answer: " + "\\text{" * 160,
        "Answer: " + "(" * 450 + "1" + ")" * 450 + " = 42",
    ],
    ids=lambda text: text[:20],
)
def test_statements_of_the_greatest_length_backtrack_little(text: str) -> None:
    extract_answer("Answer: 42")
    assert seconds(text) < 0.02


def test_digits_may_be_limited_further() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert is_correct("Answer: " + "1" * 5000, "1" * 5000)
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("033", 33),
        (33, 33),
        ("43.0", 43),
        (43.0, 43),
        ("1,000", 1000),
        ("-7", -7),
        (" −7\n", -7),
        ("$\\$1{,}000$", 1000),
        ("48^\\circ", 48),
        (1e22, 10**22),
        ("42.5", None),
        (42.5, None),
        (float("nan"), None),
        (float("inf"), None),
        ("", None),
        ("x", None),
        ("42 cm", None),
        ("42, or more", None),
        ("41, 42", None),
        ("1/2", None),
        (None, None),
        (True, None),
        ([42], None),
    ],
)
def test_ground_truths(value: object, expected: int | None) -> None:
    assert parse_integer_answer(value) == expected


def test_a_truth_that_is_no_integer_is_never_met() -> None:
    assert not is_correct("Answer: 42.5", "42.5")
    assert not is_correct("", "")


def test_agrees_with_labelled_solutions_of_word_problems(shared: Path) -> None:
    """Solutions of four models to GSM8K problems, whose last line is "A: 18"."""
    compared, differing = 0, []
    for line in (shared / "data" / "gsm8k_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth = row["ground_truth"].rsplit("A: ", 1)[1]
        for name, entry in row.items():
            if isinstance(entry, dict):
                compared += 1
                if is_correct(entry["solution"], truth, marker="A") != entry["is_correct"]:
                    differing.append((name, entry["solution"][-60:], truth, entry["is_correct"]))
    assert compared == 660 * 4
    assert not differing


def test_agrees_with_labelled_solutions_of_competition_problems(shared: Path) -> None:
    """Solutions of Qwen2.5-Math to MATH problems: verdicts where the truth is an integer, else nothing accepted."""
    compared, differing = 0, []
    for line in (shared / "data" / "math_cot_samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth = parse_integer_answer(row["answer"])
        for text, verdict in zip(row["code"], row["score"], strict=True):
            compared += truth is not None
            if is_correct(text, row["answer"]) != (verdict and truth is not None):
                differing.append((row["idx"], text[-60:], row["answer"], verdict))
    assert compared > 250
    assert not differing
