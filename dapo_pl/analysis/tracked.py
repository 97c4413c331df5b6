"""Aim repositories, opened so that what was written can be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_pl.errors import UserError


def open_repository(place: str | Path) -> Any:
    """The Aim repository in a directory, every closed run of it indexed.

    Aim leaves the runs of a fresh repository unindexed until its server has run, and a query then finds nothing.

    Raises:
        UserError: there is none.
    """
    if not (Path(place) / ".aim").is_dir():
        raise UserError(f"there is no Aim repository in {place}: name the output_dir of runs with logger=aim")
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager

    repository = Repo(str(place))
    index = RepoIndexManager.get_index_manager(repository)
    for run_hash in repository.list_all_runs():
        index.index(run_hash)
    return repository


def directories(query: str, place: str | Path) -> list[Path]:
    """The run directories that a query in Aim's language finds, oldest run first."""
    repository = open_repository(place)
    try:
        runs = [found.run for found in repository.query_runs(query, report_mode=0).iter_runs()]
    except Exception as error:  # Aim raises whatever the query raises
        raise UserError(f"Aim cannot answer the query {query!r}: {' '.join(map(str, error.args[:1]))}") from error
    runs.sort(key=lambda run: run.creation_time)
    found = [run.get(("hparams", "directory")) for run in runs]
    if not any(found):
        raise UserError(f"the query {query!r} finds no run in {place}")
    return [Path(directory) for directory in found if directory]
