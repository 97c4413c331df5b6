"""Final answers: where a response states one, and whether it is the right integer.

The last stated final answer counts, be it what follows "Answer:" on its line (or on the next line that says
something) or the content of a \\boxed{}. It must be one integer once typography is removed: LaTeX, markdown,
thousands separators, currency, a unit, the left sides of an equation. Nothing in a response is ever evaluated,
nothing raises, and the work grows in proportion to the response's length.
"""

from __future__ import annotations

import functools
import re
from numbers import Integral

LONGEST = 1000
"""Characters, digits and commas apart, that a statement may have; what is longer is a text, not an integer."""

NESTING = 6
"""Braces within braces; what is deeper is no integer."""

# Possessive (*+, ++), here and below, so that what does not match costs one pass.
_BRACED = r"\{[^{}\\]*+\}"
for _ in range(NESTING - 1):
    _BRACED = rf"\{{(?:[^{{}}\\]++|\\.|{_BRACED})*+\}}"
_BRACES = re.compile(_BRACED, re.DOTALL)
_JOINT = re.compile(r"[\s$]*(?:[,;&]|and\b|or\b|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*", re.IGNORECASE)
_SAID = re.compile(r"[^\W_]")
_LINE = re.compile(r"[^\n\r\v\f\x85\u2028\u2029]*")
_SPECIAL_TOKEN = re.compile(
    r"<[|｜][^|｜<>\n]{1,40}[|｜]>|</?s>|<(?:eos|pad|end_of_turn)>|</(?:answer|think)>|<br ?/?>"
)
_TAG = re.compile(r"</?(?:b|i|u|p|em|strong|code)>")

_TYPOGRAPHY = str.maketrans(
    {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}  # full-width forms of ASCII
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-")
    | dict.fromkeys(map(chr, (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)), " ")
    | dict.fromkeys("\x00\xad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff✓✔✅", "")
    | {"²": "^2", "³": "^3", "’": "'", "‘": "'", "“": '"', "”": '"', "。": "."}
)
_SEPARATOR = r"(?:\{,\}|\{\\[,;:! ]\}|,\\!|\\[,;:! ]|[, ~'_])"
_THOUSANDS = re.compile(
    rf"(?<![\d.,])[1-9]\d{{0,2}}({_SEPARATOR})\d{{3}}(?:\1\d{{3}})*+(?!{_SEPARATOR}?\d)", re.ASCII
)
_DROPPED = re.compile(r"\\(?:(?:text)?color|begin|end)\s*\{[^{}]*\}|\\[{}]")
_WRAPPER = re.compile(
    r"\\(?:f?box(?:ed)?|[hm]box|text[a-z]*|math[a-z]*|operatorname|boldsymbol|bm|emph|underline|ensuremath)"
    r"\s*\{([^{}]*)\}"
)
_DEGREE = re.compile(r"\^?\s*\{?\s*(?:\\(?:circ|degree|textdegree)\b|°)|\^\s*\{?\s*(?:st|nd|rd|th)\b")
_LAYOUT = re.compile(
    r"\\(?:left|right|[Bb]igg?[lr]?|displaystyle|textstyle|bf|rm|it|sf|tt|large|Large|Huge)(?![a-zA-Z])"
    r"|\\[()\[\],;:! $%#&]|&(?==)|[{}$*`~_#%\"'€£¥₹¢]"
)
_LINE_END = re.compile(r"\\\\|\\q?quad\b")

_REFUSED = re.compile(r"[<>≤≥≠≈±]|!=|\\(?:not|neq?|leq?|geq?|approx|pm)(?![a-z])")
_PARENTHESIS = re.compile(r"\([^()]*\)")
_SEVERAL = re.compile(r"\d[ )]*(?:[,;&]|\. |\\?(?:and|or|lor|land|vee|wedge)\b)|\(", re.ASCII)
_LEAD = re.compile(r"(?:the )?(?:final )?answer is:? |(?:US|USD|EUR|GBP|Rs\.?)(?= ?[-+\d])", re.IGNORECASE)
_NUMBER = re.compile(r"([-+]?) ?(\d++)(?:\.0+)?(?![\d^!]|[.,:/]\d|\.\.)", re.ASCII)
_WORD = r"[a-zA-ZÀ-ɏµμΩ]++(?: ?\^ ?-?[123])?"
_REST = re.compile(
    rf"((?:[ -]?{_WORD}(?:[./·-]? ?{_WORD}){{0,3}})?)(?:(?: ?[.,;:] | \(| —) ?[^\d=\\+^]*+)?[ .,;:)\]|]*"
)
_VARIABLE = re.compile(r"[ -]?(?:[^\Wghlms\dACFJLNVWΩ]|[abknxyz]+)(?![^\W\d_])")
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|not|plus|minus|mod|choose|half|dozen|hundred|thousand|million|billion|trillion"
    r"|squared|cubed|factorial|remainder|pi|sqrt|sin|cos|tan|log|ln)\b",
    re.IGNORECASE,
)


def is_correct(response: str, answer: int | str, marker: str = "Answer") -> bool:
    """Whether the response's final answer is the integer `answer` ("033" and 33 are the same)."""
    truth = parse_integer_answer(answer)
    return truth is not None and extract_answer(response, marker) == truth


def extract_answer(response: str, marker: str = "Answer") -> int | None:
    """The integer that the response states last, or None.

    Args:
        response: the generated text.
        marker: the word before the colon, such as "A" for a last line "A: 18"; any case.
    """
    response = _TAG.sub(" ", _SPECIAL_TOKEN.sub("\n", response))
    places = [
        (place.start(), place.end(), place["marker"] is not None) for place in _places(marker).finditer(response)
    ]
    end = len(response)
    for index in reversed(range(len(places))):
        start, behind, is_marker = places[index]
        if is_marker:
            stated = _line(response, behind, end)
            end = start
            if stated:
                return _integer(response[slice(*stated)])
            continue
        braces = _BRACES.match(response, behind)
        if braces is None or _SAID.search(braces[0]) is None:
            continue
        before = places[index - 1] if index else None
        other = _BRACES.match(response, before[1]) if before and not before[2] else None
        if other and _JOINT.fullmatch(response, other.end(), start):
            return None  # "\boxed{41} or \boxed{42}" is one statement, of two numbers
        colon = next((place for _, place, is_marker in reversed(places[:index]) if is_marker), None)
        line = colon and _line(response, colon, end)
        # In "Answer: -\boxed{7}" the line counts; when it is more than an integer, the box in it does.
        whole = _integer(response[slice(*line)]) if line and line[0] <= start < line[1] else None
        return _integer(braces[0]) if whole is None else whole
    return None


def parse_integer_answer(value: object) -> int | None:
    """A data file's ground truth as an integer, or None: 33 for "033", 43 for "43.0" and 43.0, None for "42.5"."""
    if isinstance(value, str):
        return _integer(value, unit=False)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


@functools.lru_cache
def _places(marker: str) -> re.Pattern[str]:
    """Where a final answer may begin: behind a marker with its colon, or before a box's opening brace."""
    typography = r"[\s*_`~}\])\"'”’$]{0,16}"
    return re.compile(
        rf"(?P<marker>(?<![^\W_]){re.escape(marker)}{typography}[:：])|\\(?:boxed|fbox)\s*(?={{)", re.IGNORECASE
    )


def _line(response: str, start: int, end: int) -> tuple[int, int] | None:
    """Bounds of the first line in response[start:end] that says something."""
    said = _SAID.search(response, start, end)
    if said is None:
        return None
    # The letter or digit that was found stands on the last of these lines.
    line = response[start : said.start() + 1].splitlines()[-1]
    stop = _LINE.match(response, said.start(), end)
    return said.start() + 1 - len(line), stop.end() if stop else end


def _integer(text: str, unit: bool = True) -> int | None:
    """The one integer that `text` is, typography aside; `unit` allows words behind it."""
    text = " ".join(text.translate(_TYPOGRAPHY).split())
    if len(text) - sum(map(text.count, "0123456789,")) > LONGEST:
        return None
    text = _DROPPED.sub(" ", _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text))
    for _ in range(NESTING):
        text = _WRAPPER.sub(r" \1 ", text)
    # Typography becomes a space, never nothing: 10**3, 4\,2 and 42_{10} must not grow together.
    text = _LAYOUT.sub(" ", _LINE_END.sub(" ; ", _DEGREE.sub(" ", text)))
    text = " ".join(text.split()).strip(" ;")
    if _REFUSED.search(text):
        return None
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1].strip()
    # The last side of an equation counts, but "x = 41, y = 42" and "42 (as 40 + 3 = 43)" are more than one.
    sides, _, text = text.rpartition("=")
    for _ in range(NESTING):
        sides = _PARENTHESIS.sub("", sides)
    if _SEVERAL.search(sides):
        return None
    text = text.strip()
    lead = _LEAD.match(text)
    number = _NUMBER.match(text, lead.end() if lead else 0)
    rest = number and _REST.fullmatch(text, number.end())
    if not number or not rest or _VARIABLE.match(rest[1]) or _NO_UNIT.search(rest[1]):
        return None
    if not unit and _SAID.search(rest[0]):
        return None
    value = _long_int(number[2])
    return -value if number[1] == "-" else value


def _long_int(digits: str) -> int:
    """`int` refuses strings of some thousands of digits; halves keep the work far below quadratic."""
    if len(digits) <= 600:
        return int(digits)
    low = len(digits) // 2
    return _long_int(digits[:-low]) * 10**low + _long_int(digits[-low:])
