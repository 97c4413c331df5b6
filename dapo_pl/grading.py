"""Final answers: where a response states one, and whether it is the right integer.

The last stated final answer counts, be it the rest of a line after "Answer:" (or the next line) or the
content of a \\boxed{}. It must be one integer once typography is removed: LaTeX, markdown, thousands
separators, a unit, the left side of an equation. Nothing in a response is ever evaluated, and the work is
bounded whatever its length: only a window behind each of the last few markers is looked at.
"""

from __future__ import annotations

import re
import unicodedata

WINDOW = 300
"""Characters behind a marker in which its answer must stand."""

CANDIDATES = 100
"""Markers looked at, from the last one backward, until one states something."""

_SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~'_\u00a0\u2007\u2009\u202f]|\{,\}|\{\\,\})(?=\d)", re.ASCII)
_DIGITS = re.compile(r"[\d,]{1,20000}", re.ASCII)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{0,40}\|>|</s>|<eos>|<end_of_turn>")
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|bf|rm)\b\s*")
_LAYOUT = re.compile(r"\\\\|\\(?:left|right|displaystyle|quad|qquad|[()\[\],;:! ])|\$\$?|[{}~*`_#\"“”‘’]")
_PRODUCT = re.compile(r"(?<=\d)\s*\*\s*(?=\d)", re.ASCII)
_DEGREE = re.compile(r"\^?\s*\{?\s*(?:\\(?:circ|degree)\b|°)\s*\}?|\\?%")
_CURRENCY = re.compile(r"^([-+]?\s*)(?:\\\$|[€£¥]|USD\b|US\b)\s*")
_NUMBER = re.compile(
    r"([-+]?)\s*(\d{1,3}(?:,\d{3})+|\d+)(?:\.(0*))?(?!\d|[.,]\d|[\^/!]|\s*[-+*/^×·÷]\s*[\w(\\])", re.ASCII
)
_UNIT = re.compile(r"\s*-?\s*(?:[^\W\d]+[./]?(?:\^[23])?(?!\d)[\s/·-]*){0,4}[\s)\]'.,;:!]*")
_REMARK = re.compile(r"(?:[.,;]\s+|\s*\()[^\d=\\]*")
_REFUSED = re.compile(r"[<>≤≥≠≈]|!=|\\(?:leq?|geq?|neq?|approx|pm)\b")
_EXPRESSION = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|pi)\b")
_NO_UNIT = {"or", "and", "to", "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "point", "e"}
_VARIABLE = re.compile(r"[a-dijknxyz]\b")
_BOXED = ("\\boxed", "\\fbox")
_TYPOGRAPHY = str.maketrans(
    {"\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-", "²": "^2", "³": "^3"}
)


def is_correct(response: str, answer: int | str, marker: str = "Answer") -> bool:
    """Whether the response's final answer is the integer `answer` ("033" and 33 are the same)."""
    truth = parse_integer_answer(answer)
    return truth is not None and extract_answer(response, marker) == truth


def extract_answer(response: str, marker: str = "Answer") -> int | None:
    """The integer that the response states last, or None.

    Args:
        response: the generated text.
        marker: the word before the colon; any case.
    """
    lowered = response.lower()
    if len(lowered) != len(response):  # a few letters grow when lowered, and every position would be off
        response = lowered
    behind = re.compile(r"[\s*_`}\])\"']{0,16}[:：]")
    word = marker.lower()
    places = {token: lowered.rfind(token) for token in (word, *_BOXED)}
    for _ in range(CANDIDATES):
        token, place = max(places.items(), key=lambda item: item[1])
        if place < 0:
            return None
        places[token] = lowered.rfind(token, 0, place)
        if token != word:
            content = _braced(response, place)
            if content is None or not _says_something(content):
                continue
            line_start = response.rfind("\n", max(0, place - WINDOW), place) + 1
            stated = lowered.rfind(word, line_start, place)
            if stated >= 0 and (colon := behind.match(response, stated + len(word))):
                statement = _statement(response, colon.end())
                # "Answer: \boxed{41} or \boxed{42}" states two numbers; around a single box there may be words.
                whole = _integer(statement)
                if whole is not None or statement.count("\\boxed") > 1:
                    return whole
            return _integer(content)
        if place and lowered[place - 1].isalnum():
            continue
        colon = behind.match(response, place + len(word))
        if colon is None:
            continue
        statement = _statement(response, colon.end())
        if _says_something(statement):
            return _integer(statement)
    return None


def parse_integer_answer(value: object) -> int | None:
    """A data file's ground truth as an integer, or None: 33 for "033", 43 for "43.0" and 43.0, None for "42.5"."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return _integer(value, unit=False) if isinstance(value, str) else None


def _statement(response: str, start: int) -> str:
    """The rest of the line, or the next line that says something, within the window."""
    window = response[start : start + WINDOW]
    for line in window.splitlines():
        if _says_something(line):
            if not window.endswith(line):
                return line
            # The window may cut a number; without the rest of its digits it would be another one.
            rest = _DIGITS.match(response, start + len(window))
            return line + rest[0] if rest else line
    return ""


def _says_something(text: str) -> bool:
    return any(character.isalnum() for character in _SPECIAL_TOKEN.sub("", text))


def _braced(response: str, start: int) -> str | None:
    """Content of the first {…} within the window, braces matched; None if it does not close there."""
    window = response[start : start + WINDOW]
    opening = window.find("{")
    if opening < 0 or window[:opening].strip().lower() not in _BOXED:
        return None
    depth = 0
    for place in range(opening, len(window)):
        if window[place] == "{" and window[place - 1] != "\\":
            depth += 1
        elif window[place] == "}" and window[place - 1] != "\\":
            depth -= 1
            if depth == 0:
                return window[opening + 1 : place]
    return None


def _integer(text: str, unit: bool = True) -> int | None:
    """The one integer that `text` is, typography aside."""
    text = _SPACE_IN_NUMBER.sub(",", text.strip())
    text = unicodedata.normalize("NFKC", text.translate(_TYPOGRAPHY))
    text = _SPECIAL_TOKEN.sub("", text)
    text = _DEGREE.sub(" ", text)
    text = _WRAPPER.sub("", text.replace("\\$", "$"))
    text = _PRODUCT.sub("×", text)
    text = _LAYOUT.sub(lambda match: " " if match[0].startswith(("\\", "~")) else "", text).strip()
    # Only a plain = links equal sides; in "a <= 42" or "x ≠ 42" nothing is stated.
    if _REFUSED.search(text):
        return None
    text = text.rpartition("=")[2].strip()
    if _EXPRESSION.search(text):
        return None
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]", "''"):
        text = text[1:-1].strip()
    text = _CURRENCY.sub(r"\1", text)
    number = _NUMBER.match(text)
    if number is None:
        return None
    rest = text[number.end() :]
    if not (_UNIT.fullmatch(rest) or _REMARK.fullmatch(rest)) or _VARIABLE.match(rest):
        return None
    words = set(re.findall(r"[^\W\d]+", rest.lower().partition(". ")[0]))
    if words & _NO_UNIT or (words and not unit):
        return None
    value = _long_int(number[2].replace(",", ""))
    return -value if number[1] == "-" else value


def _long_int(digits: str) -> int:
    """`int` refuses strings of some thousands of digits."""
    value = 0
    for start in range(0, len(digits), 4000):
        piece = digits[start : start + 4000]
        value = value * 10 ** len(piece) + int(piece)
    return value
