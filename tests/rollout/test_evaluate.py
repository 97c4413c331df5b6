"""Evaluation through the real writer, whatever the responses say."""

from __future__ import annotations

import json
from pathlib import Path

from scripted_engine import ScriptedEngine

from callbacks.monitors.evaluation import EvaluationSettings, evaluate_and_keep
from callbacks.progress import StatusLine
from dapo_pl.evaluation import EvaluationResult
from dapo_pl.rollout.types import Prompt


def test_a_number_of_thousands_of_digits_neither_crashes_nor_counts(tmp_path: Path) -> None:
    """Problem 0 is answered rightly, problem 1 by a number that no JSON writer takes."""
    prompts = [Prompt("a", (0,), 7), Prompt("b", (1,), 7)]
    settings = EvaluationSettings("heldout", samples=2, temperature=1.0, top_p=1.0)
    texts = {0: "Answer: 7", 1: "Answer: " + "9" * 5000}

    class Stating(ScriptedEngine):
        def submit(self, request, prompt, sampling, seed) -> None:
            super().submit(request, prompt, sampling, seed)
            self._running[request][0].text = texts[prompt[0]]

    engine = Stating(lambda prompt, seed: (0, 2))
    result, tokens, _ = evaluate_and_keep(engine, prompts, settings, 8, tmp_path, "evaluation", StatusLine())
    assert result.correct == [[True, True], [False, False]]
    assert result.answers == [[7, 7], [None, None]]
    assert tokens == engine.tokens_generated == 8
    assert EvaluationResult.from_json(tmp_path / "evaluation.json") == result
    rows = [json.loads(line) for line in (tmp_path / "evaluation.responses.jsonl").read_text().splitlines()]
    assert [row["stated_answer"] for row in rows] == [7, 7, None, None]
