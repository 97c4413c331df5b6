"""What a run ends with: accuracy before and after, what it cost, where things are, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from callbacks.monitors.prompts import outcome_rows
from callbacks.progress import duration
from dapo_pl.evaluation import paired_difference, per_problem_avg_at_k
from dapo_pl.rollout.ledger import CostLedger
from dapo_pl.rollout.types import OUTCOMES

if TYPE_CHECKING:
    from experiments.assembly import Plan, Run


def summarise(run: Run, plan: Plan, overrides: Sequence[str], total_seconds: float) -> dict[str, Any]:
    """Everything the final table shows, as plain values for `summary.json`."""
    steps = plan.rollout.steps
    first = min(run.evaluation.results)
    before, after = run.evaluation.results[first], run.evaluation.results[steps]
    difference = paired_difference(per_problem_avg_at_k(before.correct), per_problem_avg_at_k(after.correct))
    cost = run.data.ledger.compute()
    phases = {name: cost[f"{name}_seconds"] for name in ("generation", "update", "sync", "evaluation")}
    return {
        "samples": plan.evaluation.samples,
        "problems": len(plan.evaluation_prompts),
        "first_step": first,
        "steps": steps,
        "seed": plan.config.seed,
        "techniques": [technique.name for technique in plan.techniques],
        "before": before.summary(),
        "after": after.summary(),
        "difference": {
            "mean": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "p_value": difference.p_value,
        },
        "cost": cost,
        "groups": outcome_rows(run.data.sampler.history),
        "seconds": {
            "total": total_seconds,
            **phases,
            "warm_start": run.warm_start_seconds,
            "rest": total_seconds - sum(phases.values()) - run.warm_start_seconds,
        },
        "skipped_mini_batches": run.module.skipped_mini_batches,
        "directory": str(plan.directory),
        "same": "".join(
            f"{shlex.quote(text)} " for text in overrides if not text.startswith(("technique", "ckpt_path"))
        ),
        "aim": {"repo": str(plan.config.output_dir), "run": run.aim_hash},
    }


def final_table(summary: dict[str, Any]) -> str:
    """The summary as a person reads it."""
    k = summary["samples"]
    before, after, difference = summary["before"], summary["after"], summary["difference"]

    before_label = f"after {summary['first_step']} steps" if summary["first_step"] else "before"

    def cell(values: dict[str, float], name: str) -> str:
        low, high = values[f"{name}_low"], values[f"{name}_high"]
        return f"{100 * values[name]:5.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    rows = [
        f"accuracy on {summary['problems']} held-out problems, percent [95% interval over problems]",
        f"  {'':8} {before_label:>22} {'after ' + str(summary['steps']) + ' steps':>22}",
    ]
    for name in (f"avg@{k}", f"pass@{k}", f"cons@{k}"):
        rows.append(f"  {name:8} {cell(before, name):>22} {cell(after, name):>22}")
    rows.append(
        f"  paired difference of avg@{k}: {100 * difference['mean']:+.1f} points "
        f"[{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}], p = {difference['p_value']:.2g}"
    )
    cost, seconds = summary["cost"], summary["seconds"]
    generated = max(1, cost["tokens_generated"])
    rows += [
        "cost",
        f"  responses: {cost['responses_generated']:,.0f} generated, {cost['responses_used']:,.0f} used",
        f"  tokens:    {cost['tokens_generated']:,.0f} generated, {cost['tokens_used']:,.0f} used "
        f"({cost['tokens_used'] / generated:.0%}), {cost['tokens_evaluation']:,.0f} more in evaluation",
        *wasted(cost),
        f"  time:      {duration(seconds['total'])} = generation {duration(seconds['generation'])}, "
        f"update {duration(seconds['update'])}, weight sync {duration(seconds['sync'])}, "
        f"evaluation {duration(seconds['evaluation'])}, warm start {duration(seconds['warm_start'])}, "
        f"the rest {duration(seconds['rest'])}",
        f"  memory:    {summary['peak_memory_gb']:.1f} GB at the peak",
    ]
    rows += group_rows(summary["groups"])
    if summary["skipped_mini_batches"]:
        rows.append(f"  {summary['skipped_mini_batches']} mini-batches had every response masked and were skipped")
    directory, aim = summary["directory"], summary["aim"]
    rows += [
        "where it is",
        f"  checkpoint {directory}/checkpoints/last.ckpt, the model as a transformers directory {directory}/model",
        f"  samples {directory}/samples.jsonl, evaluations {directory}/evaluations, curves {directory}/metrics.jsonl",
        f"  how each prompt fared {directory}/prompts.jsonl",
    ]
    if aim["run"]:
        rows.append(f"  Aim run {aim['run']}")
    see = f"aim up --repo {aim['repo']}" if aim["run"] else f"less {directory}/metrics.jsonl"
    rows += [
        "next",
        f"  see the curves and samples:   {see}",
        "  evaluate with more samples:   "
        f"python experiments/evaluate.py model={directory}/model evaluation.samples=32",
        f"  ablate a technique:           python experiments/run.py {summary['same']}technique=-dynamic_sampling",
    ]
    return "\n".join(rows)


def wasted(cost: dict[str, float]) -> list[str]:
    """What became of the training tokens that were not used, the largest part first."""
    parts = {fate: cost[f"tokens_{fate}"] for fate in CostLedger.FATES if fate not in ("used", "evaluation")}
    named = sorted((-amount, fate) for fate, amount in parts.items() if amount)
    if not named:
        return []
    return [
        "             not used: " + ", ".join(f"{-amount:,.0f} {fate.replace('_', ' ')}" for amount, fate in named)
    ]


SHOWN = 6
"""Rows of the table of groups; all of them are in summary.json."""


def group_rows(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Groups judged, by epoch and source, the newest `SHOWN`, with shares in percent."""
    width = max((len(row["source"]) for row in groups), default=0)
    lines = []
    for row in groups[-SHOWN:]:
        judged = sum(row[outcome] for outcome in OUTCOMES)
        found = ", ".join(
            f"{100 * row[outcome] / judged:.0f}% {outcome.replace('_', ' ')}" for outcome in OUTCOMES if row[outcome]
        )
        lines.append(
            f"  epoch {row['epoch']:3} {row['source']:{width}} {judged:6,} groups, "
            f"{row['accepted']:,} accepted: {found}"
        )
    return lines
