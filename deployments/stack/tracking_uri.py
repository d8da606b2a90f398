"""The form of MLFLOW_TRACKING_URI, which is checked before anything is started."""

from importlib.metadata import entry_points

from storage.errors import ConfigError
from storage.store import addresses

VARIABLE = "MLFLOW_TRACKING_URI"
SERVERS = ("http", "https")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""A driver may follow: `postgresql+psycopg2`."""
OTHERS = ("file", "databricks", "databricks-uc")
PLUGINS = "mlflow.tracking_store"
"""Group of entry points: packages that add a scheme to MLflow."""


def refuse_unusable(uri: str) -> None:
    """Raise ConfigError for a value that MLflow's client cannot use, whatever the network does."""
    if reason := _fault(uri):
        raise ConfigError(
            f"{VARIABLE}={addresses.without_credentials(uri)} is not an address of MLflow "
            f"({reason}); write it as http://HOST:5000, or unset it to use a local server"
        )


def _fault(uri: str) -> str:
    """Return what is wrong with the address; empty when it has the form of one."""
    scheme, colon, _ = uri.partition(":")
    scheme = scheme.lower()
    if not uri.isprintable():
        return "it contains control characters"
    if uri in OTHERS[1:]:
        return ""
    if not colon:
        return "it has no scheme"
    if scheme in SERVERS:
        try:
            addresses.check_server_address(VARIABLE, uri)
        except ConfigError:
            return "host or port is missing or wrong"
        return ""
    if scheme.partition("+")[0] in DATABASES or scheme in OTHERS:
        return ""
    if scheme in {plugin.name for plugin in entry_points(group=PLUGINS)}:
        return ""
    return f"MLflow has no scheme {scheme[:20]!r}"
