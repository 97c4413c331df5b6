"""Recorded rollouts: what `datasets` reads, what a damaged file says, and a replay that trains bit for bit alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from training import make_module, make_trainer, recorded_groups

from callbacks.monitors.evaluation import EvaluationMonitor, EvaluationSettings
from callbacks.monitors.rewards import RewardMonitor
from callbacks.monitors.rollouts import RolloutRecorder
from callbacks.progress import StatusLine
from callbacks.techniques.dynamic_sampling import DynamicSampling
from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import RolloutDataModule
from dapo_pl.errors import UserError
from dapo_pl.evaluation import EvaluationResult
from dapo_pl.models.directory import check_model, load_tokenizer
from dapo_pl.rewards import task_reward
from dapo_pl.rollout.engine import Engine, Sampling
from dapo_pl.rollout.records import SCHEMA, read_steps, step_path, to_table, write_step
from dapo_pl.rollout.replay_engine import ReplayEngine
from dapo_pl.rollout.sampler import PromptOrder, Rollout, RolloutSettings, Sampler
from dapo_pl.rollout.task_reward import TOTAL, RewardSettings, TaskReward
from dapo_pl.rollout.transformers_engine import TransformersEngine
from dapo_pl.rollout.types import Prompt
from dapo_pl.seams import Seams

SAMPLING = Sampling(max_tokens=12)


def rollout_of(first: int = 0, log_probs: bool = True) -> Rollout:
    """Four groups of four, the third not accepted, the fourth dropped."""
    groups = recorded_groups(seed=first)
    for group in groups:
        group.index += first
        for number, response in enumerate(group.responses):
            response.text = f"Answer: {number} ✓\n"
            response.stated_answer = None if number == 3 else number
            response.reward_components = {"vowels": 0.1 * number, "task": 0.2}
            if log_probs:
                response.log_probs = torch.linspace(-3, -0.1, response.length).tolist()
    groups[3].dropped = True
    groups[3].responses[0].reward_failures = {"vowels": "took longer than 5 s"}
    return Rollout(groups[:2], groups, {}, 1.0)


def test_datasets_loads_what_was_written(tmp_path: Path) -> None:
    from datasets import load_dataset

    rollouts = [rollout_of(0), rollout_of(4, log_probs=False)]
    for step, rollout in enumerate(rollouts, start=1):
        write_step(tmp_path, step, rollout, SAMPLING)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    data: Any = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert data.column_names == SCHEMA.names
    assert len(data) == 32
    rows = iter(data)
    for step, rollout in enumerate(rollouts, start=1):
        for place, group in enumerate(rollout.examined):
            for number, response in enumerate(group.responses):
                row = next(rows)
                assert (row["step"], row["group_index"], row["number"]) == (step, group.index, number)
                assert (row["prompt_id"], row["answer"]) == (group.prompt.id, 1)
                assert tuple(row["prompt_token_ids"]) == group.prompt.token_ids
                for name in ("token_ids", "text", "stated_answer", "correct", "truncated", "policy_version"):
                    assert row[name] == getattr(response, name)
                assert row["log_probs"] == response.log_probs  # float32 as engines give them, so exactly
                assert row["reward"] == (None if place == 3 else response.reward)
                assert row["accepted"] == (place < 2)
                assert {
                    part["name"]: part["value"] for part in row["reward_components"]
                } == response.reward_components
    failures = data[12]["reward_failures"]
    assert failures == [{"name": "vowels", "reason": "took longer than 5 s"}]


def test_the_same_rollout_is_the_same_file_and_text_that_no_file_takes_is_written(tmp_path: Path) -> None:
    first = write_step(tmp_path, 1, rollout_of(), SAMPLING).read_bytes()
    assert write_step(tmp_path, 1, rollout_of(), SAMPLING).read_bytes() == first
    rollout = rollout_of()
    rollout.examined[0].responses[0].text = "a\ud800b\x00"
    write_step(tmp_path, 1, rollout, SAMPLING)
    assert read_steps(tmp_path)[0][0]["text"] == "a?b\x00"


def test_a_disk_without_room_names_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(UserError, match=r"rollouts/step_000001\.parquet.*record_rollouts=false"):
        write_step(tmp_path / "rollouts", 1, rollout_of(), SAMPLING)

    class Full:
        def __getattr__(self, name: str) -> Any:
            raise OSError(28, "No space left on device")

    write_step(tmp_path / "good", 1, rollout_of(), SAMPLING)
    before = step_path(tmp_path / "good", 1).read_bytes()
    rollout = rollout_of(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_pl.rollout.records.pq", Full())
        with pytest.raises(UserError, match="No space left"):
            write_step(tmp_path / "good", 1, rollout, SAMPLING)
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["step_000001.parquet"]
    assert step_path(tmp_path / "good", 1).read_bytes() == before


def replaced(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """The table with one value changed, whatever the schema thinks of it."""
    field = SCHEMA.field(name)
    values = table.column(name).to_pylist()
    values[row] = value
    loose = pa.field(name, field.type)
    return table.set_column(table.schema.get_field_index(name), loose, pa.array(values, field.type))


def retyped(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    values = [str(value) for value in table.column(name).to_pylist()]
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda table: table.drop_columns(["text"]), "no column 'text'"),
        (lambda table: retyped(table, "answer", pa.string()), "column 'answer' holds string, it must hold int64"),
        (lambda table: table.slice(0, 0), "holds no rows"),
        (lambda table: replaced(table, "text", 4, None), "row 5: column 'text' is empty"),
        (lambda table: replaced(table, "token_ids", 2, [1, None]), "row 3: column 'token_ids' has an empty place"),
        (lambda table: replaced(table, "token_ids", 2, []), "row 3: column 'token_ids' holds no token ids"),
        (lambda table: replaced(table, "token_ids", 2, [-5]), "row 3: column 'token_ids' holds no token ids"),
        (lambda table: replaced(table, "log_probs", 7, [-0.5] * 40), "row 8: 40 log-probs for"),
        (lambda table: replaced(table, "step", 1, 3), "row 2: column 'step' is 3 in the file of step 2"),
        (lambda table: replaced(table, "prompt_token_ids", 6, [1, 2]), "row 7: group 5 has another prompt"),
        (lambda table: replaced(table, "number", 6, 1), "row 7: response 1 of group 5 stands where 2 should"),
        (lambda table: table.slice(1), "row 1: response 1 of group 4 stands where 0 should"),
        (lambda table: table.slice(0, 15), "row 15: group 7 ends here with 3 of 4 responses"),
        (lambda table: pa.concat_tables([table, table]), "row 17: response 0 of group 4 stands where 4 should"),
        (lambda table: to_table(2, rollout_of(3), SAMPLING), "group 3 is already in step_000001.parquet"),
        (
            lambda table: table.replace_schema_metadata({"sampling": '{"temperature": "hot"}'}),
            "the sampling settings in its metadata",
        ),
    ],
)
def test_damage_is_named_by_file_and_row(tmp_path: Path, damage: Any, words: str) -> None:
    """Step 2 of two is damaged, as a table that is otherwise sound parquet."""
    write_step(tmp_path, 1, rollout_of(0), SAMPLING)
    path = step_path(tmp_path, 2)
    pq.write_table(damage(to_table(2, rollout_of(4), SAMPLING)), path)
    with pytest.raises(UserError, match=words) as refusal:
        ReplayEngine(path=tmp_path, max_model_len=64)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("kept", [0, 3, 200, -1, -20])
def test_a_file_cut_short_is_named(tmp_path: Path, kept: int) -> None:
    path = write_step(tmp_path, 1, rollout_of(), SAMPLING)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="damaged or cut short") as refusal:
        read_steps(tmp_path)
    assert str(path) in str(refusal.value)


def test_a_flipped_byte_never_changes_a_row(tmp_path: Path) -> None:
    """It is refused with the file's name, or stands where it changes nothing that is read."""
    path = write_step(tmp_path, 1, rollout_of(), SAMPLING)
    whole, (rows, _) = path.read_bytes(), read_steps(tmp_path)
    refused = 0
    for place in range(0, len(whole), 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read = read_steps(tmp_path)[0]
        except UserError as error:
            message = str(error)
            refused += str(path) in message
            continue
        assert read == rows, place
    assert refused > 20


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        read_steps(tmp_path / "none")
    with pytest.raises(UserError, match="no step_"):
        read_steps(tmp_path)
    write_step(tmp_path, 1, rollout_of(0), SAMPLING)
    write_step(tmp_path, 3, rollout_of(4), SAMPLING)
    with pytest.raises(UserError, match=r"step_000002\.parquet is missing"):
        read_steps(tmp_path)


def test_the_engine_keeps_the_protocol_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    rollout = rollout_of()
    write_step(tmp_path, 1, rollout, SAMPLING)
    engine: Engine = ReplayEngine(path=tmp_path, max_model_len=32)
    first, second = rollout.examined[:2]
    assert engine.step() == []
    engine.submit("0:2", first.prompt.token_ids, SAMPLING, seed=5)
    engine.submit("1:0", list(second.prompt.token_ids), SAMPLING, seed=5)
    engine.submit("99:0", first.prompt.token_ids, SAMPLING, seed=5)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.sync(iter([]), 3)
    answered = dict(engine.step())
    for name, recorded in (("0:2", first.responses[2]), ("1:0", second.responses[0])):
        response = answered.pop(name)
        for part in ("token_ids", "text", "truncated", "policy_version", "log_probs"):
            assert getattr(response, part) == getattr(recorded, part)
        assert not response.correct
        assert response.reward == 0
    assert not answered
    assert engine.tokens_generated == first.responses[2].length + second.responses[0].length
    with pytest.raises(UserError, match=r"request 99:0 .* was not recorded"):
        engine.step()
    assert engine.abort(["99:0", "0:2"]) == 0
    assert engine.step() == []
    engine.sync(iter([("weight", torch.zeros(1))]), 3)
    assert engine.policy_version == 3

    # the recorded draw, but another prompt: another seed's or another data set's order
    engine.submit("0:2", second.prompt.token_ids, SAMPLING, seed=5)
    with pytest.raises(UserError, match="not recorded"):
        engine.step()
    engine.abort(["0:2"])
    engine.submit("0:2", first.prompt.token_ids, Sampling(temperature=0.7, max_tokens=12), seed=5)
    with pytest.raises(UserError, match=r"step 1 was recorded with temperature=1.0.*asked for are temperature=0.7"):
        engine.step()
    engine.abort(["0:2"])
    engine.submit("0:2", first.prompt.token_ids, Sampling(max_tokens=12, log_probs=False), seed=5)
    assert engine.step()[0][1].log_probs is None
    with pytest.raises(ValueError, match="exceed the window 32"):
        engine.submit("0:2", first.prompt.token_ids * 10, SAMPLING, seed=5)
    engine.close()


class Steps(L.Callback):
    """Keeps what was trained on, and the weights after each step."""

    def __init__(self) -> None:
        self.accepted: list[list[tuple[int, list[float], list[list[int]]]]] = []
        self.examined: list[list[int]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self.examined.append([group.index for group in batch.rollout.examined])
        self.accepted.append(
            [
                (group.index, [r.reward for r in group.responses], [r.token_ids for r in group.responses])
                for group in batch.rollout.accepted
            ]
        )
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture(scope="module")
def prompts(tiny_model: str) -> list[Prompt]:
    tokenizer = load_tokenizer(tiny_model)
    texts = [f"{number} + {number % 3} =" for number in range(9)]
    return [Prompt(str(n), tuple(tokenizer(text)["input_ids"]), 1) for n, text in enumerate(texts)]  # pyright: ignore


def train(
    model: str, prompts: list[Prompt], engine: Engine, directory: Path, *extra: L.Callback
) -> tuple[Any, Steps]:
    """Two steps on continuous rewards of a worker's, with Dynamic Sampling and two updates a step."""
    L.seed_everything(0, verbose=False)
    seams = Seams(reward_terms={TOTAL: task_reward})
    DynamicSampling().apply(seams)
    module = make_module(model, seams, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    reward = TaskReward(
        RewardSettings.from_options({"_target_": "reward_functions.vowels", "minimum": 0.0, "timeout_seconds": 30.0})
    )
    sampler = Sampler(
        engine=engine,
        order=PromptOrder(prompts, seed=0),
        seams=seams,
        settings=RolloutSettings(
            steps=2,
            groups_per_step=2,
            group_size=4,
            mini_batch_size=4,
            max_prompts_per_step=9,
            on_shortfall="keep_unmixed",
        ),
        sampling=Sampling(max_tokens=16),
        seed=0,
        max_in_flight=24,
        task_reward=reward,
    )
    steps = Steps()
    trainer = make_trainer(directory, callbacks=[RewardMonitor(reward), steps, *extra])
    trainer.fit(module, datamodule=RolloutDataModule(sampler, module.ledger))
    assert reward.pool.pids == []
    return module, steps


@pytest.fixture(scope="module")
def recorded(
    tiny_model: str, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Steps, Path]]:
    directory = tmp_path_factory.mktemp("recorded")
    facts, tokenizer = check_model(tiny_model), load_tokenizer(tiny_model)
    engine = TransformersEngine(
        model=tiny_model,
        end_ids=list(facts.end_ids),
        pad_id=facts.pad_id,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),  # pyright: ignore
        dtype="float32",
        max_model_len=64,
    )
    module, steps = train(tiny_model, prompts, engine, directory, RolloutRecorder(directory / "rollouts"))
    yield module, steps, directory / "rollouts"
    engine.close()


def test_a_replay_trains_bit_for_bit_like_the_recorded_run(
    recorded: tuple[Any, Steps, Path], tiny_model: str, prompts: list[Prompt], tmp_path: Path
) -> None:
    module, steps, directory = recorded
    start = dict(make_module(tiny_model, Seams()).policy_weights())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in module.policy_weights())
    assert all(len(set(rewards)) > 1 for step in steps.accepted for _, rewards, _ in step)

    engine = ReplayEngine(path=directory, max_model_len=64)
    again, replayed = train(tiny_model, prompts, engine, tmp_path, RolloutRecorder(tmp_path / "rollouts"))
    assert replayed.accepted == steps.accepted
    assert replayed.examined == steps.examined
    weights = dict(again.policy_weights())
    for name, tensor in module.policy_weights():
        assert torch.equal(tensor, weights[name]), name
    for mine, theirs in zip(replayed.metrics, steps.metrics, strict=True):
        for name, value in theirs.items():
            if "seconds" not in name:
                assert mine[name] == pytest.approx(value, rel=0, abs=0, nan_ok=True), name
    assert [row["engine/policy_lag_max"] for row in replayed.metrics] == [0, 0]
    for path in sorted(directory.iterdir()):
        assert (tmp_path / "rollouts" / path.name).read_bytes() == path.read_bytes()


def test_rewards_and_their_parts_are_logged_and_recorded(recorded: tuple[Any, Steps, Path]) -> None:
    _, steps, directory = recorded
    rows, samplings = read_steps(directory)
    assert samplings == {1: Sampling(max_tokens=16), 2: Sampling(max_tokens=16)}
    for step, metrics in enumerate(steps.metrics, start=1):
        texts = [row["text"] for row in rows if row["step"] == step]
        expected = sum(sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts) / len(texts)
        assert metrics["reward/vowels_mean"] == pytest.approx(expected, rel=1e-6)
        assert metrics["reward/task_mean"] == pytest.approx(expected, rel=1e-6)
        assert metrics["reward/vowels_failures"] == 0
    accepted = {row["group_index"] for row in rows if row["accepted"]}
    assert accepted == {index for step in steps.accepted for index, _, _ in step}


def test_a_longer_replay_than_the_record_says_so(
    recorded: tuple[Any, Steps, Path], tiny_model: str, prompts: list[Prompt], tmp_path: Path
) -> None:
    _, _, directory = recorded
    shutil.copy(step_path(directory, 1), step_path(tmp_path, 1))
    with pytest.raises(UserError, match="was not recorded"):
        train(tiny_model, prompts, ReplayEngine(path=tmp_path, max_model_len=64), tmp_path)


def test_a_resumed_run_removes_what_it_will_make_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step, rollout_of(4 * step), SAMPLING)
    (tmp_path / ".step_000004.parquet.123").write_text("half")

    class Data(RolloutDataModule):
        def __init__(self) -> None:
            self.step = 2

    class Trainer:
        datamodule = Data()

    RolloutRecorder(tmp_path).on_train_start(Trainer(), None)  # pyright: ignore
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]


def test_a_replay_takes_over_the_evaluations_and_only_those_of_its_problems(tmp_path: Path) -> None:
    result = EvaluationResult(["a"], [7], [[7, 8]], [[True, False]], [[3, 4]], [[False, False]])
    (tmp_path / "theirs").mkdir()
    result.to_json(tmp_path / "theirs" / "step_000000.json")

    def monitor(problem: str, name: str) -> EvaluationMonitor:
        return EvaluationMonitor(
            EvaluationSettings("heldout", 2, 1.0, 1.0),
            [Prompt(problem, (1,), 7)],
            8,
            tmp_path / name,
            StatusLine(),
            recorded=tmp_path / "theirs",
        )

    class Trainer:
        loggers = ()

    taken = monitor("a", "mine")
    taken.evaluate(Trainer(), 0)  # pyright: ignore
    assert taken.results == {0: result}
    assert json.loads((tmp_path / "mine" / "step_000000.json").read_text()) == json.loads(
        (tmp_path / "theirs" / "step_000000.json").read_text()
    )
    with pytest.raises(UserError, match="no evaluation"):
        taken.evaluate(Trainer(), 2)  # pyright: ignore
    with pytest.raises(UserError, match="evaluates other problems"):
        monitor("b", "other").evaluate(Trainer(), 0)  # pyright: ignore
