"""Generation for evaluation: every problem, k samples, through the same engine as training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapo_pl.evaluation import EvaluationResult
from dapo_pl.rollout.engine import Engine, Sampling, request_seed
from dapo_pl.rollout.sampler import RolloutInterrupted, grade
from dapo_pl.rollout.types import Prompt, Response


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[EvaluationResult, list[list[Response]]]:
    """Answer and grade every prompt `samples` times.

    A response's seed depends on `seed`, the problem's id and the sample's number alone, so two policies meet
    the same random numbers.

    Returns:
        The result table and the responses, [problems][samples].
    """
    responses: list[list[Response | None]] = [[None] * samples for _ in prompts]
    for row, prompt in enumerate(prompts):
        for number in range(samples):
            engine.submit(
                f"{row}:{number}", prompt.token_ids, sampling, request_seed(seed, "evaluation", prompt.id, number)
            )
    total = len(prompts) * samples
    done = 0
    try:
        while done < total:
            for request, response in engine.step():
                row, number = map(int, request.split(":"))
                grade([response], prompts[row].answer)
                responses[row][number] = response
                done += 1
            on_progress(done, total)
            if should_stop():
                raise RolloutInterrupted
    finally:
        engine.abort(f"{row}:{number}" for row in range(len(prompts)) for number in range(samples))
    table = [[response for response in row if response is not None] for row in responses]
    result = EvaluationResult(
        problem_ids=[prompt.id for prompt in prompts],
        truths=[prompt.answer for prompt in prompts],
        answers=[[response.stated_answer for response in row] for row in table],
        correct=[[response.correct for response in row] for row in table],
        lengths=[[response.length for response in row] for row in table],
        truncated=[[response.truncated for response in row] for row in table],
    )
    return result, table
