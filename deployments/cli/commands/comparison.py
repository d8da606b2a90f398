"""The command `astraflow compare`: runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli import run_id_completion
from deployments.cli.output.terminal import (
    AsJson,
    console,
    local_path,
    say,
    show,
    store,
    warn,
    write_text,
)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN …",
            help="Run ids; the others are compared with the first one.",
            autocompletion=run_id_completion.suggest,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            help="Also write the comparison as a page: curves, gains, settings.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: accuracies, gains with their intervals, and the settings that differ.

    Gains are of the problems on which both newest evaluations played (paired bootstrap).

    Example:  astraflow compare baseline lower-lr --out comparison.html
    """
    from deployments.cli.output import comparison_tables
    from storage.errors import AstraFlowError, ConfigError
    from storage.run import runs as stored_runs
    from tasks.monitoring.comparison import compare as compare_runs
    from tasks.recipes.stored_config import read_config
    from tasks.reports.comparison_page import render_comparison
    from tasks.tracking.comparison_link import comparison_link
    from tasks.tracking.mlflow_sync import tracking_uri

    names = list(dict.fromkeys(runs))
    if len(names) < 2:
        raise ConfigError(
            f"one run ({names[0]}) is not a comparison; name at least two (`astraflow runs` lists "
            "them)"
        )
    opened = store()
    compared = compare_runs(opened, names)
    link = None
    try:
        if uri := tracking_uri():
            configs = [read_config(stored_runs.open_run(opened, name)) for name in names]
            experiments = [config.tracking.experiment for config in configs]
            link = comparison_link(uri, list(zip(experiments, names, strict=True)))
    except AstraFlowError as error:
        warn(f"no link to MLflow: {error}")
    if out is not None:
        write_text(out, render_comparison(compared, link))
    if as_json:
        show(comparison_tables.comparison_json(compared), as_json)
        return
    for run in compared.runs:
        for problem in run.problems:
            warn(f"{run.run_id}: {problem}")
    console().print(comparison_tables.comparison_table(compared))
    if link:
        say(f"in MLflow: {link}")
    if out is not None:
        say(str(out))
