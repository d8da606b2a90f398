"""The report of a run: one self-contained HTML page, made from the store alone, whether the run is over or not.

    status, history, shard log, evaluations, episode samples ──▶ figures ──▶ report.html.j2 ──▶ report.html

This module gathers and words; drawing stands in `plots.py`, the page's looks in the template.
"""

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from storage import heartbeats, layout
from storage import runs as stored_runs
from storage.objects import ObjectStore, open_store
from tasks import evals, report_figures
from tasks.config import RunConfig
from tasks.episode_samples import EpisodeSample, sample_episodes
from tasks.history import History, read_history
from tasks.mlflow_runs import flatten
from tasks.shard_log import ShardLog, read_shard_log
from tasks.status import Status, newest_version, status_of
