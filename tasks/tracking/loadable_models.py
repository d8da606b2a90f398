"""The folder of a registered model: MLflow's own form, so that MLflow loads what is registered.

    copy        mlflow.transformers.load_model("models:/astraflow-solver@champion"): the weights are
                among MLflow's artifacts
    reference   mlflow.pyfunc.load_model(…): they stay in the run's store, and are read from there

A base model that MLflow's flavor `transformers` cannot describe is registered as plain files, as
`astraflow export` writes them.
"""

import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from rollout.agents.chat_process import check_tokenizer
from storage.formats import tokenizer_files
from storage.records.promotions import TeamVersion
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import reader
from storage.written_files import write_inside
from tasks.maintenance.export import export_model
from tasks.tracking import referenced_model
from tasks.tracking.referenced_model import REFERENCE, WeightsReference, describe

log = logging.getLogger(__name__)

WeightsPlace: TypeAlias = Literal["copy", "reference"]
TASK = "text-generation"
REQUIREMENTS = ("torch", "transformers")
GENERATION = {"max_new_tokens": 256, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
"""Parameters of `predict` of a model by reference, with their defaults."""


@contextmanager
def loadable_model(
    run: ObjectStore,
    policy: str,
    version: TeamVersion,
    place: WeightsPlace,
    tags: Mapping[str, str],
) -> Iterator[Path]:
    """Write the model of a version into a temporary folder; its tags are MLflow's `metadata`.

    Raises what `export_model` raises.
    """
    with tempfile.TemporaryDirectory(prefix="astraflow-model-") as temporary:
        files, model = Path(temporary) / "files", Path(temporary) / "model"
        if place == "reference":
            _write_reference(run, policy, version, files)
            _save_reference(files, model, tags)
        else:
            export_model(run, policy, version.version, files)
            _save_copy(files, model, tags)
        yield model


def _write_reference(run: ObjectStore, policy: str, version: TeamVersion, folder: Path) -> None:
    reference = WeightsReference(
        store=runs.store_of(run).address,
        run_id=version.run_id,
        policy=policy,
        version=version.version,
        digest=version.digest,
    )
    files = {**reader.fetch_files(run, policy, 0), REFERENCE: describe(reference)}
    for name, body in files.items():
        write_inside(folder, name, body)


def _save_reference(files: Path, model: Path, tags: Mapping[str, str]) -> None:
    import mlflow.pyfunc
    from mlflow.environment_variables import MLFLOW_UV_AUTO_DETECT
    from mlflow.models import infer_signature

    # MLflow would copy `uv.lock` of the working directory into the model, and install from it.
    os.environ[MLFLOW_UV_AUTO_DETECT.name] = "false"
    release = importlib.metadata.version("astraflow")
    mlflow.pyfunc.save_model(
        str(model),
        loader_module=referenced_model.__name__,
        data_path=str(files),
        signature=infer_signature(["a prompt"], ["its answer"], params=GENERATION),
        pip_requirements=[f"astraflow=={release}"],
        metadata=dict(tags),
    )


def _save_copy(files: Path, model: Path, tags: Mapping[str, str]) -> None:
    import mlflow.transformers

    logger = logging.getLogger("mlflow.transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a missing model card and licence
    try:
        _restrict_tokenizer(files)
        mlflow.transformers.save_model(
            str(files),
            str(model),
            task=TASK,
            pip_requirements=list(REQUIREMENTS),
            metadata=dict(tags),
        )
    except BaseException as error:  # transformers raises anything; a panic is no Exception
        if not tokenizer_files.is_failure(error):
            raise
        log.warning(
            "%s is registered as plain files, which MLflow cannot load: %s: %s",
            " ".join(tags.values()),
            type(error).__name__,
            error,
        )
        shutil.rmtree(model, ignore_errors=True)
        files.rename(model)
    finally:
        logger.setLevel(level)


def _restrict_tokenizer(folder: Path) -> None:
    """Write the files into a folder with which its tokenizer is loaded as workers load it.

    MLflow loads it in this process: raises ConfigError where that would take very long, or very
    much memory.
    """
    files = {
        name: (folder / name).read_bytes()
        for name in tokenizer_files.FILES
        if (folder / name).exists()
    }
    check_tokenizer(files)
    for name, body in tokenizer_files.restricted(files).items():
        write_inside(folder, name, body)
