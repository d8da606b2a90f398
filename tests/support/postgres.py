"""A Postgres server of Debian's packages in its own process, on a free local port; stopped, and its
folder deleted, at the end of the block.

Postgres refuses to run as root: as root, its processes are those of the user `nobody`.
"""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.machine.ports import unusual_port
from tests.support.patience import until

HOST = "127.0.0.1"
USER = "astraflow"
NOBODY = 65534
DEBIAN = Path("/usr/lib/postgresql")
"""Debian has a folder here for each version, and none of their programs on the path."""


def missing() -> str:
    """Why no server can be started; empty where one can."""
    if not _installed():
        return "Postgres is not installed; `apt-get install postgresql` installs it"
    if os.geteuid() == 0 and not any(user.pw_uid == NOBODY for user in pwd.getpwall()):
        return "Postgres does not run as root, and there is no user nobody"
    return ""


@contextmanager
def postgres(script: Path) -> Iterator[str]:
    """The authority of the server's URLs, `user:password@host:port`, when a file of SQL has been run
    once.
    """
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="astraflow-postgres-", dir="/tmp"))
    # of the user that runs Postgres, who cannot enter pytest's folders
    as_root = os.geteuid() == 0
    own = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_root else {}
    if as_root:
        os.chown(folder, NOBODY, NOBODY)
    password = secrets.token_hex(8)
    (folder / "password").write_text(password)
    (folder / "password").chmod(0o644)  # in a folder of mode 0700
    port = unusual_port()
    data = folder / "data"
    with (folder / "log").open("wb") as log:
        out = {"stdout": log, "stderr": log, "cwd": folder, **own}
        create = [programs / "initdb", "--pgdata", data, "--username", USER, "--no-sync"]
        secured = ["--auth", "scram-sha-256", "--pwfile", folder / "password"]
        subprocess.run([*create, *secured, "--locale", "C.UTF-8"], check=True, **out)  # type: ignore[call-overload]
        address = ["-D", data, "-h", HOST, "-p", str(port), "-k", folder]
        server = subprocess.Popen([programs / "postgres", *address, "-c", "fsync=off"], **out)  # type: ignore[call-overload]
    try:
        until(
            lambda: (
                server.poll() is not None
                or _psql(port, password, "postgres", "-c", "select 1").returncode == 0
            ),
            0.1,
        )
        assert server.poll() is None, (folder / "log").read_text()[-4000:]
        created = _psql(port, password, "postgres", "-f", str(script))
        assert created.returncode == 0, created.stderr
        yield f"{USER}:{password}@{HOST}:{port}"
    finally:
        server.terminate()  # no new connections; ends when the clients have left
        try:
            server.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder)


def rows(authority: str, database: str, question: str) -> list[str]:
    """The answer's lines."""
    port, password = _port_and_password(authority)
    return _psql(port, password, database, "-tA", "-c", question).stdout.split()


def dump(authority: str, database: str) -> bytes:
    """All tables and rows, as SQL."""
    port, password = _port_and_password(authority)
    command = [_programs() / "pg_dump", *_address(port), "-d", database]
    done = subprocess.run(command, env=_with(password), capture_output=True, check=True)
    return done.stdout


def _psql(
    port: int, password: str, database: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    where = [*_address(port), "-d", database]
    return subprocess.run(
        [_programs() / "psql", *where, "--no-psqlrc", "-v", "ON_ERROR_STOP=1", *arguments],
        env=_with(password),
        capture_output=True,
        text=True,
        check=False,
    )


def _port_and_password(authority: str) -> tuple[int, str]:
    credentials, _, address = authority.partition("@")
    return int(address.partition(":")[2]), credentials.partition(":")[2]


def _address(port: int) -> list[str]:
    return ["-h", HOST, "-p", str(port), "-U", USER]


def _with(password: str) -> dict[str, str]:
    return {**os.environ, "PGPASSWORD": password}


def _programs() -> Path:
    """The folder with the server's programs, of the newest version; LookupError without one."""
    if not (installed := _installed()):
        raise LookupError(missing())
    return installed[0]


def _installed() -> list[Path]:
    """The folders with a server's programs, newest version first."""
    versions = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = shutil.which("initdb")
    places = [path.parent for path in versions[::-1]] + ([Path(found).parent] if found else [])
    return [place for place in places if (place / "postgres").exists()]
