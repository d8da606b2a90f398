import base64
import os
import resource
import stat
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.servers import auth
from storage.errors import ConfigError

SECRET = "astraflow:0123456789"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


def test_each_home_has_its_own_permanent_secret(home: Home, tmp_path: Path) -> None:
    made = auth.create(home)
    assert auth.create(home) == made == auth.read(home)
    other = Home(tmp_path / "other")
    other.create()
    assert auth.create(other) != made
    user, password = made.split(":")
    assert (user, len(password)) == ("astraflow", 43)


def test_only_the_owner_may_read_the_secret(home: Home) -> None:
    auth.create(home)
    assert stat.S_IMODE(home.auth.stat().st_mode) == 0o600


def test_a_secret_is_not_written_through_a_symbolic_link(home: Home, tmp_path: Path) -> None:
    home.auth.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{home.auth} is a link to a missing file; delete it"):
        auth.create(home)
    assert not (tmp_path / "elsewhere").exists()


def test_a_secret_file_of_another_user_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth.create(home)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(ConfigError, match=f"{home.auth} belongs to another user; delete it"):
        auth.create(home)
    assert auth.read_or_empty(home) == ""


def test_a_home_without_a_secret_has_none(home: Home) -> None:
    assert auth.read(home) is None


@pytest.mark.parametrize("body", [b"", b"astraflow:", b"somebody:else", b"no colon", b"\xff"])
def test_a_damaged_secret_is_reported_with_a_remedy(home: Home, body: bytes) -> None:
    home.auth.write_bytes(body)
    with pytest.raises(
        ConfigError, match=f"{home.auth} .*run `astraflow down`, then `astraflow up`"
    ):
        auth.create(home)
    assert home.auth.read_bytes() == body
    assert auth.read_or_empty(home) == ""


def test_the_header_is_that_of_basic_authentication() -> None:
    assert auth.basic(SECRET) == f"Basic {base64.b64encode(SECRET.encode()).decode()}"


def test_an_address_contains_a_ticket_for_a_day_and_not_the_secret() -> None:
    now_s = 1_700_000_000.0
    address = auth.page("http://127.0.0.1:4200", SECRET, "/runs/flow-run/1", now_s)
    base, _, rest = address.partition("#")
    ticket, _, target = rest.partition("/")
    assert (base, target) == ("http://127.0.0.1:4200/open", "runs/flow-run/1")
    assert "0123456789" not in address
    assert base64.b64encode(SECRET.encode()).decode() not in address
    assert auth.is_valid(ticket, SECRET, now_s)
    assert auth.is_valid(ticket, SECRET, now_s + 24 * 3600)
    assert not auth.is_valid(ticket, SECRET, now_s + 25 * 3600)


def test_a_ticket_of_another_secret_or_with_a_changed_expiry_is_invalid() -> None:
    now_s = 1_700_000_000.0
    ticket = auth.page("", SECRET, "", now_s).partition("#")[2]
    hour, _, mac = ticket.partition(".")
    assert not auth.is_valid(ticket, "astraflow:another", now_s)
    assert not auth.is_valid(f"{int(hour, 16) + 1:x}.{mac}", SECRET, now_s)
    for made_up in ("", ".", hour, f"{hour}.", f".{mac}", "ä.ö"):
        assert not auth.is_valid(made_up, SECRET, now_s)


def test_digests_of_secrets_differ_and_contain_no_secret() -> None:
    assert auth.digest(SECRET) != auth.digest("astraflow:another")
    assert "0123456789" not in auth.digest(SECRET)


def test_the_cookies_of_two_stacks_differ_and_contain_no_secret() -> None:
    (name, value), (other_name, other_value) = auth.cookie(SECRET), auth.cookie("astraflow:another")
    assert name != other_name
    assert value != other_value
    assert "0123456789" not in name + value


def test_a_pipe_in_place_of_the_secret_is_refused_without_blocking(home: Home) -> None:
    os.mkfifo(home.auth)
    with pytest.raises(ConfigError, match=f"{home.auth} is not a regular file"):
        auth.create(home)
    assert auth.read_or_empty(home) == ""


def test_a_full_disk_is_named_and_leaves_no_empty_secret(home: Home) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # the same error without a name
    try:
        with pytest.raises(ConfigError, match=r"/auth cannot be written .*; free some space, or"):
            auth.create(home)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not home.auth.exists()
