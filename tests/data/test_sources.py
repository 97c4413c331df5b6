"""Prompt sources: what they share, and problem files, against a real file and hand-written ones."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_pl.data.problem_files import ProblemFile
from dapo_pl.data.sources import DEFAULT_TEMPLATE, fill_template, make_problem
from dapo_pl.errors import UserError

AIME = Path(__file__).parents[3] / "shared" / "data" / "aime-2024.parquet"
needs_aime = pytest.mark.skipif(not AIME.exists(), reason="../shared/data/aime-2024.parquet is absent")

# the official answer key of AIME 2024, I and II
AIME_2024_ANSWERS = [
    *(204, 25, 809, 116, 104, 294, 540, 197, 480, 113, 371, 385, 110, 104, 721),
    *(73, 236, 45, 33, 80, 55, 699, 127, 902, 468, 601, 23, 321, 211, 315),
]


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def simple(path: Path, **options) -> ProblemFile:
    return ProblemFile(path, prompt_column="question", answer_column="answer", **options)


def dapo_row(prompt="What is 2 + 3? Put it after Answer:", answer="5", raw="What is 2 + 3?") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"raw_problem": raw, "index": 1},
    }


class TestCommon:
    def test_template_keeps_other_braces(self):
        messages = fill_template(r"{question} End with \boxed{}.", "1 + 1 = ?\n")
        assert messages == [{"role": "user", "content": r"1 + 1 = ? End with \boxed{}."}]

    @pytest.mark.parametrize("template", ["no place", "{question} and {question}", "{Question}"])
    def test_template_needs_the_question_once(self, template):
        with pytest.raises(UserError, match=r"data\.template must contain \{question\} exactly once"):
            ProblemFile("problems.jsonl", template=template)

    def test_default_template_asks_for_the_last_line(self):
        assert DEFAULT_TEMPLATE.count("{question}") == 1
        assert "Answer: <integer>" in DEFAULT_TEMPLATE

    def test_id_depends_on_question_and_answer_only(self):
        one = make_problem("Q", 1, "a", fill_template("{question}", "Q"))
        assert one["id"] == make_problem("Q\n", 1, "b", fill_template("{question}!", "Q"))["id"]
        assert one["id"] != make_problem("Q", 2, "a", one["messages"])["id"]
        assert one["id"] != make_problem("R", 1, "a", one["messages"])["id"]


@needs_aime
class TestAime:
    def test_thirty_problems_with_the_official_answers(self, caplog):
        with caplog.at_level(logging.INFO):
            problems = ProblemFile(AIME).load("train")
        assert len(problems) == 30
        assert Counter(problems["answer"]) == Counter(AIME_2024_ANSWERS)
        assert len(set(problems["id"])) == 30
        assert "30 problems from 960 rows (930 repeats)" in caplog.text

    def test_brings_its_own_prompt(self):
        own = pq.read_table(AIME).to_pylist()
        prompts = {row["prompt"][0]["content"]: row["extra_info"]["raw_problem"] for row in own}
        for row in ProblemFile(AIME, template="ours: {question}").load("train").to_list():
            ((message),) = row["messages"]
            assert message["role"] == "user"
            assert prompts[message["content"]] == row["question"]
            assert row["source"] == "aime-2024.parquet"

    def test_the_same_rows_as_json_lines(self, tmp_path):
        path = write_lines(tmp_path / "aime.jsonl", pq.read_table(AIME).to_pylist()[:40])
        rows = ProblemFile("unused", evaluation_path=path).load("evaluation")
        assert set(rows["id"]) <= set(ProblemFile(AIME).load("train")["id"])


class TestGoodFiles:
    def test_mapped_columns_go_through_the_template(self, tmp_path):
        path = write_lines(tmp_path / "p.jsonl", [{"question": "2 + 3", "answer": 5}])
        (row,) = simple(path, template="{question} = ?").load("train").to_list()
        assert row["messages"] == [{"role": "user", "content": "2 + 3 = ?"}]
        assert (row["answer"], row["question"], row["source"]) == (5, "2 + 3", "p.jsonl")

    @pytest.mark.parametrize(
        ("written", "value"),
        [("033", 33), ("43.0", 43), (43.0, 43), (-7, -7), ("1,000", 1000), (2**63 - 1, 2**63 - 1)],
    )
    def test_written_integers(self, tmp_path, written, value):
        path = write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": written}])
        assert simple(path).load("train")["answer"] == [value]

    def test_repeats_collapse_by_integer_value(self, tmp_path, caplog):
        rows = [dapo_row(answer="033"), dapo_row(answer="33"), dapo_row(raw="Another", answer="33")]
        with caplog.at_level(logging.INFO):
            problems = ProblemFile(write_lines(tmp_path / "p.jsonl", rows)).load("train")
        assert problems["question"] == ["What is 2 + 3?", "Another"]
        assert "2 problems from 3 rows (1 repeats)" in caplog.text

    def test_contradicting_answers_are_kept_and_said(self, tmp_path, caplog):
        problems = ProblemFile(write_lines(tmp_path / "p.jsonl", [dapo_row(), dapo_row(answer="6")])).load("train")
        assert problems["answer"] == [5, 6]
        assert "1 questions come with more than one answer" in caplog.text

    def test_without_raw_problem_the_last_message_is_the_question(self, tmp_path):
        row = dapo_row(raw=" ")
        row["prompt"] = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
        (problem,) = ProblemFile(write_lines(tmp_path / "p.jsonl", [row])).load("train").to_list()
        assert problem["question"] == "What is 2 + 3? Put it after Answer:"
        assert [message["role"] for message in problem["messages"]] == ["system", "user"]

    def test_content_decides_the_format_not_the_name(self, tmp_path):
        lines = write_lines(tmp_path / "lines.parquet", [dapo_row()])
        table = tmp_path / "table.jsonl"
        pq.write_table(pa.Table.from_pylist([dapo_row()]), table)
        assert ProblemFile(lines).load("train")["answer"] == ProblemFile(table).load("train")["answer"] == [5]

    def test_blank_lines_byte_order_mark_and_line_separators(self, tmp_path):
        path = tmp_path / "p.jsonl"
        row = '{"question": "a\u2028b", "answer": "1"}'
        path.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\n".encode() + b'{"question": "c", "answer": "2"}')
        assert simple(path).load("train")["question"] == ["a\u2028b", "c"]

    def test_flat_column_with_a_dot_in_its_name(self, tmp_path):
        row = {"prompt": "q", "reward_model.ground_truth": "4"}
        assert ProblemFile(write_lines(tmp_path / "p.jsonl", [row])).load("train")["answer"] == [4]
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
        assert ProblemFile(tmp_path / "p.parquet").load("train")["answer"] == [4]


class TestBadFiles:
    def fails(self, path: Path, match: str, **options) -> None:
        with pytest.raises(UserError, match=match):
            simple(path, **options).load("train")

    def test_missing_names_the_neighbour(self, tmp_path):
        write_lines(tmp_path / "problems.jsonl", [])
        self.fails(tmp_path / "problem.jsonl", r"problem\.jsonl does not exist; did you mean 'problems\.jsonl'")
        self.fails(tmp_path / "none" / "p.jsonl", "neither does its folder")
        (tmp_path / "empty").mkdir()
        self.fails(tmp_path / "empty" / "p.jsonl", "holds no parquet or JSON-lines file")
        self.fails(tmp_path, "is a folder")

    @pytest.mark.parametrize("content", [b"", b"\n \n"])
    def test_empty(self, tmp_path, content):
        (tmp_path / "p.jsonl").write_bytes(content)
        self.fails(tmp_path / "p.jsonl", r"p\.jsonl is empty")

    def test_empty_parquet(self, tmp_path):
        pq.write_table(
            pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "p"
        )
        self.fails(tmp_path / "p", "p is empty")

    def test_other_formats(self, tmp_path):
        (tmp_path / "p.csv").write_text("question,answer\nq,1\n")
        self.fails(tmp_path / "p.csv", "neither parquet nor JSON-lines")
        (tmp_path / "p.parquet").write_bytes(b"\x1f\x8b\x08\x00")
        self.fails(tmp_path / "p.parquet", "neither parquet nor JSON-lines")
        (tmp_path / "p.json").write_text('[{"question": "q", "answer": 1}]')
        self.fails(tmp_path / "p.json", "one JSON array")
        (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut off")
        self.fails(tmp_path / "cut.parquet", "begins like a parquet file but cannot be read")

    @pytest.mark.parametrize("line", [b'{"question": "q", "answ', b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
    def test_a_line_that_is_no_json(self, tmp_path, line):
        (tmp_path / "p.jsonl").write_bytes(b'{"question": "q", "answer": 1}\n\n' + line + b"\n")
        self.fails(tmp_path / "p.jsonl", r"p\.jsonl: 1 of 2 lines cannot be used: line 3: is no JSON")

    def test_a_first_line_that_is_no_json(self, tmp_path):
        (tmp_path / "p.jsonl").write_text("question: q\n")
        self.fails(tmp_path / "p.jsonl", "line 1: is no JSON")

    def test_a_line_that_is_no_object(self, tmp_path):
        self.fails(
            write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": 1}, 5]), "line 2: is JSON, but no object"
        )

    def test_a_missing_column(self, tmp_path):
        path = write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": 1}, {"question": "q", "answr": 1}])
        self.fails(path, r"p\.jsonl.*line 2: no column 'answer' \(did you mean 'answr'\?\)")
        pq.write_table(pa.Table.from_pylist([{"questions": "q", "answer": "1"}]), tmp_path / "p.parquet")
        self.fails(tmp_path / "p.parquet", r"p\.parquet, row 1: no column 'question'; did you mean 'questions'")

    def test_a_missing_nested_column(self, tmp_path):
        pq.write_table(pa.Table.from_pylist([dapo_row() | {"reward_model": {"truth": "5"}}]), tmp_path / "p.parquet")
        with pytest.raises(UserError, match=r"row 1: no column 'reward_model\.ground_truth'"):
            ProblemFile(tmp_path / "p.parquet").load("train")

    @pytest.mark.parametrize(
        "answer", ["42.5", "three", "", None, True, [3], {"a": 1}, float("nan"), 1e300, str(2**63)]
    )
    def test_an_answer_that_is_no_64_bit_integer(self, tmp_path, answer):
        path = write_lines(
            tmp_path / "p.jsonl", [{"question": "q", "answer": 1}, {"question": "r", "answer": answer}]
        )
        self.fails(path, r"line 2: column 'answer' is .*(no integer|too large)")

    @pytest.mark.parametrize(
        "prompt", ["", " \n", None, 7, [], [{"role": "user", "content": " "}], [{"role": "user"}], ["text"]]
    )
    def test_an_empty_or_malformed_prompt(self, tmp_path, prompt):
        self.fails(
            write_lines(tmp_path / "p.jsonl", [{"question": prompt, "answer": 1}]), "line 1: column 'question'"
        )

    def test_first_few_are_shown_all_are_reported(self, tmp_path):
        rows = [{"question": f"q{n}", "answer": "a half" if n % 2 else n} for n in range(20)]
        path = write_lines(tmp_path / "p.jsonl", rows)
        with pytest.raises(UserError) as error:
            simple(path, report_dir=tmp_path / "reports").load("train")
        text = str(error.value)
        assert "10 of 20 lines" in text
        assert text.count("a half") == 3
        report = tmp_path / "reports" / "p.jsonl.bad_rows.jsonl"
        assert str(report) in text
        reported = [json.loads(line) for line in report.read_text().splitlines()]
        assert [row["line"] for row in reported] == list(range(2, 21, 2))
        assert {row["value"] for row in reported} == {"a half"}

    def test_max_bad_share(self, tmp_path, caplog):
        path = write_lines(tmp_path / "p.jsonl", [{"question": f"q{n}", "answer": n or "?"} for n in range(10)])
        problems = simple(path, max_bad_share=0.1, report_dir=tmp_path).load("train")
        assert problems["answer"] == list(range(1, 10))
        assert "1 of 10 lines" in caplog.text
        assert "p.jsonl.bad_rows.jsonl" in caplog.text
        self.fails(path, "data.max_bad_share", max_bad_share=0.09)
        with pytest.raises(UserError, match=r"data\.max_bad_share is 1"):
            simple(path, max_bad_share=1)

    def test_nothing_usable_is_an_error_whatever_the_share(self, tmp_path):
        self.fails(
            write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": "?"}]), "1 of 1", max_bad_share=0.99
        )

    def test_unwritable_report(self, tmp_path):
        path = write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": "?"}])
        self.fails(path, r"data\.report_dir: .* cannot be written", report_dir=path / "reports")

    def test_splits(self, tmp_path):
        path = write_lines(tmp_path / "p.jsonl", [{"question": "q", "answer": "1"}])
        with pytest.raises(UserError, match=r"data\.evaluation_path is not set"):
            simple(path).load("evaluation")
        with pytest.raises(ValueError, match="split is 'eval'"):
            simple(path).load("eval")  # pyright: ignore[reportArgumentType]
