"""Run MLflow's server behind a `Guard`, in place of `mlflow server`, which has no authentication.

It listens on the loopback interface only. `mlflow server` starts a child process and passes it
environment variables; here there is one process, which sets them itself. Their names are private
to MLflow; a test starts the server and uses it.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from deployments.paths import home
from deployments.servers import auth
from deployments.servers.guard import Guard
from deployments.servers.listening import listen

ARTIFACTS = "mlflow-artifacts:/"
"""Artifacts are uploaded to the server, which stores them in its folder."""


def main(arguments: list[str]) -> None:
    """`python -m deployments.servers.mlflow_server --folder HOME/mlflow --port 5000`."""
    parser = argparse.ArgumentParser(prog="deployments.servers.mlflow_server")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    auth_string = auth.read(home())
    if auth_string is None:
        sys.exit(f"{home().auth} is missing; `astraflow up` creates it")
    database = f"sqlite:///{options.folder / 'mlflow.db'}"
    listener = listen(options.port)
    temporary = options.folder / "tmp"
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.update(
        {
            # At its start MLflow deletes what is old in folders that it expects here. In /tmp,
            # another user could have made them, with links to folders of this one.
            "TMPDIR": str(temporary),
            "_MLFLOW_SERVER_FILE_STORE": database,
            "_MLFLOW_SERVER_REGISTRY_STORE": database,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": ARTIFACTS,
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(options.folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
        }
    )
    tempfile.tempdir = None  # it is read again
    import uvicorn  # before MLflow, which checks whether it runs in a server
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(database, database, ARTIFACTS)
    guarded = Guard(app, auth_string, authenticates=False)
    settings = uvicorn.Config(guarded, log_level="warning")
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
