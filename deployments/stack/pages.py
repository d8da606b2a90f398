"""The addresses of the servers' pages, as a person is shown them."""

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack.state import Stack


def prefect(home: Home, stack: Stack, path: str = "/") -> str:
    """A page of Prefect. On our own server the address logs the browser in, for a day."""
    auth_string = auth.known(home) if stack.own_server else ""
    return (
        auth.page(stack.ui_url, auth_string, path)
        if auth_string
        else f"{stack.ui_url}{path}".rstrip("/")
    )


def mlflow(home: Home, stack: Stack) -> str:
    """MLflow's page. On our own server the address logs the browser in, for a day."""
    auth_string = auth.known(home) if stack.own_mlflow else ""
    return auth.page(stack.mlflow_url, auth_string) if auth_string else stack.mlflow_url
