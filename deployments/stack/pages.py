"""The addresses of the servers' web pages, for printing."""

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack.state import Stack


def prefect(home: Home, stack: Stack, path: str = "/") -> str:
    """Return a page of Prefect. The address of our own server logs the browser in, for a day."""
    auth_string = auth.read_or_empty(home) if stack.own_server else ""
    return (
        auth.page(stack.ui_url, auth_string, path)
        if auth_string
        else f"{stack.ui_url}{path}".rstrip("/")
    )


def mlflow(home: Home, stack: Stack) -> str:
    """Return MLflow's page. The address of our own server logs the browser in, for a day."""
    auth_string = auth.read_or_empty(home) if stack.own_mlflow else ""
    return auth.page(stack.mlflow_url, auth_string) if auth_string else stack.mlflow_url
