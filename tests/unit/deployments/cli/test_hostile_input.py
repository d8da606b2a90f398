"""Any input to the command line gives one sentence and exit code 1 or 2, before anything starts."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from deployments.cli.output.terminal import write_text
from storage.errors import ConfigError
from tasks.recipes import yaml_file
from tasks.recipes.yaml_file import read
from tests.support.runs.small_run import SmallRun
from tests.support.stores.ordinary_user import as_ordinary_user

BASE = "extends: multi_policy_tiny\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES = {
    "NUL": "steps: 4\0\n",
    "an escape sequence": "steps: \x1b[31m4\n",
    "a byte that is no text": b"steps: \xff\xfe\n",
    "half a pair": b"name: \xed\xa0\x80\n",
    "half a pair, escaped": BASE + 'name: "\\ud800"\n',
    "half a pair in a path": BASE + 'data: {prompts: {path: "\\ud800.jsonl"}}\n',
    "a NUL in a path": BASE + 'data: {prompts: {path: "a\\0.jsonl"}}\n',
    "a NUL in a model's path": BASE + 'policies: {solver: {model: {path: "a\\0"}}}\n',
    "a path that is too long": BASE + f"data: {{prompts: {{path: {'x' * 5000}.jsonl}}}}\n",
    "a user that is not there": BASE + "data: {prompts: {path: ~no-such-user-here/a.jsonl}}\n",
    "a folder instead of a file": BASE + "data: {prompts: {path: /}}\n",
    "a device instead of a file": BASE + "data: {prompts: {path: /dev/zero.jsonl}}\n",
    "utf-16": "steps: 4\n".encode("utf-16"),
    "empty": "\n",
    "a comment": "# nothing\n\n",
    "a word": "hello\n\n",
    "a list": "- 1\n- 2\n",
    "a number": "5\n\n",
    "null": "~\n\n",
    "two documents": "steps: 4\n---\nsteps: 5\n",
    "a tab": "steps:\n\t- 4\n",
    "an open bracket": "a: [1, 2\n",
    "an open quote": "a: 'x\n",
    "an unknown alias": "a: *nobody\n",
    "an anchor within itself": "a: &a [*a]\n",
    "a section within itself": "a: &a {b: *a}\n",
    "a billion laughs": LAUGHS,
    "a billion merges": MERGES,
    "a merge of a number": "a:\n  <<: 3\n",
    "deep lists": "a: " + "[" * 5000 + "\n",
    "deep lists, closed": "a: " + "[" * 500 + "]" * 500 + "\n",
    "deep sections": "".join(f"{' ' * i}a:\n" for i in range(500)),
    "deep dashes": "- " * 5000 + "x\n",
    "deep braces": "a: " + "{a: " * 200 + "1" + "}" * 200 + "\n",
    "a list as a key": "? [a, b]\n: 1\n",
    "a section as a key": "? {a: 1}\n: 1\n",
    "a key twice": "steps: 4\nsteps: 5\n",
    "a number as a key": BASE + "3: 4\n",
    "null as a key": BASE + "~: 4\n",
    "a date as a key": BASE + "2001-01-01: 4\n",
    "a python object": "a: !!python/object/apply:os.system [id]\n",
    "a tag of nobody": "a: !strange x\n",
    "a float that is none": "a: !!float abc\n",
    "a whole number that is none": "a: !!int abc\n",
    "a truth that is none": "a: !!bool maybe\n",
    "a time that is none": "a: !!timestamp never\n",
    "a date that is none": "a: 2001-99-99\n",
    "bytes that are none": "a: !!binary '%%%'\n",
    "pairs that are none": "a: !!pairs {b: 1}\n",
    "a set": BASE + "steps: !!set {a, b}\n",
    "bytes": BASE + "name: !!binary aGVsbG8=\n",
    "5,000 digits": f"steps: {'9' * 5000}\n",
    "5,000 digits of base 16": BASE + f"steps: 0x{'F' * 5000}\n",
    "5,000 digits of base 16 as an argument": BASE
    + f"rollout: {{workflow: {{args: {{a: 0x{'F' * 5000}}}}}}}\n",
    "5,000 digits of base 16 as a name": BASE
    + f"rollout: {{workflow: {{name: 0x{'F' * 5000}}}}}\n",
    "infinitely many steps": BASE + "steps: .inf\n",
    "no number of steps": BASE + "steps: .nan\n",
    "10^30 steps": BASE + "steps: 1e30\n",
    "10^400 steps": BASE + "steps: 1e400\n",
    "minus one step": BASE + "steps: -1\n",
    "half a step": BASE + "steps: 0.5\n",
    "a step that is true": BASE + "steps: true\n",
    "a date of steps": BASE + "steps: 2001-01-01\n",
    "infinity as an argument": BASE + "data: {filter: [{name: zero_advantage, args: {a: .inf}}]}\n",
    "a date as an argument": BASE + "rollout: {workflow: {args: {a: 2001-01-01}}}\n",
    "a region that is markup": BASE + "rollout: {regions: {'[/]': {workers: 1}}}\n",
    "a region that is a path": BASE + "rollout: {regions: {../x: {workers: 1}}}\n",
    "a policy that is a path": BASE + "policies: {../x: {model: {tiny: {}}}}\n",
    "a policy of 300 letters": BASE + f"policies: {{{'x' * 300}: {{model: {{tiny: {{}}}}}}}}\n",
    "a name that is a path": BASE + "name: ../../x\n",
    "a name of 300 letters": BASE + f"name: {'x' * 300}\n",
    "an empty name": BASE + "name: ''\n",
    "policies that are a number": BASE + "policies: 3\n",
    "data that is a list": BASE + "data: [1]\n",
    "everything null": "policies: ~\ndata: ~\nrollout: ~\n",
    "a mirror on another machine": BASE
    + "rollout: {regions: {us-east: {mirror: 'file://host/store'}}}\n",
    "a mirror with a secret": BASE
    + "rollout: {regions: {us-east: {mirror: 's3://user:secret@bucket/x'}}}\n",
    "a mirror that is no URL": BASE + "rollout: {regions: {us-east: {mirror: '://'}}}\n",
    "extends a list": "extends: [a]\n\n",
    "extends itself": "extends: ./recipe.yaml\n",
    "extends what is not there": "extends: nobody\n\n",
    "extends a folder": "extends: /\n\n",
    "extends a NUL": 'extends: "a\\0b"\n\n',
    "extends what is too long": f"extends: {'x' * 5000}\n\n",
    "a megabyte of remarks": "# " + "x" * 1_100_000 + "\n",
    "50,000 keys": "".join(f"k{number}: 1\n" for number in range(50_000)),
}


@pytest.fixture(autouse=True)
def closed_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which nothing can start: accepted input fails there."""
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def is_one_sentence(said: Result) -> bool:
    """Return the error sentence of refused input; fail for the error of the unwritable home, which
    shows that input was accepted.
    """
    assert said.exit_code in (1, 2), said.output
    assert not re.search(r"unexpected \w*(Error|Exception|Warning|Exit)", said.stderr), said.stderr
    assert "Traceback" not in said.stderr
    assert "\x1b" not in said.stderr
    assert "secret" not in said.stderr
    return len(said.stderr.strip()) > 10 and "cannot hold the stack" not in said.stderr


def test_valid_input_reaches_the_unwritable_home() -> None:
    Path("recipe.yaml").write_text(BASE)
    result = call("run", "--recipe", "./recipe.yaml")
    assert (result.exit_code, is_one_sentence(result)) == (2, False)


@pytest.mark.parametrize("text", RECIPES.values(), ids=RECIPES.keys())
def test_a_hostile_recipe_gives_one_sentence_that_names_it(text: str | bytes) -> None:
    Path("recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = call("run", "--recipe", "./recipe.yaml")
    assert is_one_sentence(result)
    assert result.exit_code == 2
    assert "recipe.yaml" in result.stderr or "extends" in str(text)
    assert len(result.stderr) < 20_000


ASSIGNMENTS = (
    *(
        "",
        "=",
        "=4",
        "steps",
        "steps=",
        "steps=[",
        "steps=\0",
        "steps=\x1b[2J",
        "steps=*a",
        "steps=.inf",
        "steps=1e30",
    ),
    *(
        "steps=!!float x",
        "steps=2001-99-99",
        "steps=!!python/name:os.system",
        "a..b=1",
        ".=1",
        "*=1",
        "*.*=1",
        "policies.*=1",
    ),
    *(
        f"steps={'9' * 5000}",
        f"steps=0x{'F' * 5000}",
        f"{'a.' * 5000}a=1",
        f"steps={'[' * 5000}",
        f"{'x' * 5000}",
        "extends=x",
    ),
    *(
        "policies.solver.model.path=a\0b",
        "data.prompts.path=~no-such-user-here/a.jsonl",
        "data=3",
        "data.prompts=.nan",
        "\ud800=1",
    ),
    *(
        "name=../x",
        'name="\\ud800"',
        "rollout.regions.us-east.workers=1e9",
        "rollout.regions.[/].workers=1",
        "data.curate.0.name=x",
    ),
)


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=range(len(ASSIGNMENTS)))
def test_a_hostile_assignment_gives_one_sentence(assignment: str) -> None:
    result = call("run", "--set", assignment)
    assert is_one_sentence(result)
    assert len(result.stderr) < 2_000


RUN_IDS = (
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    "x" * 101,
    "x" * 100_000,
    "a b",
    "a\n",
    "\x1b[2J",
    "a\0",
    "-x",
    "\u202e",
    "é",
)


@pytest.mark.parametrize("run_id", RUN_IDS, ids=range(len(RUN_IDS)))
def test_a_run_id_is_validated_before_the_stack_is_started(run_id: str) -> None:
    result = call("run", f"--run-id={run_id}")
    assert is_one_sentence(result)
    assert "cannot be a run id; use up to 100 letters, digits" in result.stderr
    assert len(result.stderr) < 500


@pytest.mark.parametrize(
    "recipe",
    ["", "\0", "a\0b", "x" * 5000, "/", ".", "..", "\x1b[2J", "\ud800", "/dev/null", "a/" * 5000],
)
def test_an_impossible_recipe_path_gives_one_sentence(recipe: str) -> None:
    assert is_one_sentence(call("run", f"--recipe={recipe}"))


def _pipe(name: str) -> str:
    os.mkfifo(name)
    return name


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("./pipe.yaml", "a pipe, a device or a socket"),
        ("/dev/zero", "a pipe, a device or a socket"),
        ("./f.yaml", "a folder"),
    ],
)
def test_a_recipe_path_that_is_no_file_gives_the_kind_of_object(recipe: str, what: str) -> None:
    _pipe("pipe.yaml")
    os.mkdir("f.yaml")
    result = call("run", f"--recipe={recipe}")
    assert (result.exit_code, result.stderr) == (
        2,
        f"{recipe} is {what}; name a file with a recipe in it\n",
    )


@pytest.mark.parametrize("path", ["pipe.jsonl", "pipe.parquet", "/dev/zero"])
def test_a_prompts_path_that_is_no_file_gives_the_kind_of_object(path: str, tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        _pipe(f"pipe.{suffix}")
    result = call("run", "--set", f"prompts.path={path}")
    assert result.stderr == (
        f"--set prompts.path: data.prompts.path: {tmp_path / path} is a pipe, a device or a "
        "socket; name a file\n"
    )


SERVERS = (
    *(
        "nonsense",
        "http://",
        "ftp://x/api",
        "http://[",
        "http://127.0.0.1:99999/api",
        "http://127.0.0.1:-1/api",
        "http://a b/api",
    ),
    *(
        "\x1b[2J",
        "http://\u202e/api",
        "http://\udcff/api",
        " ",
        "//x",
        "file:///etc/passwd",
        "http:127.0.0.1",
        "x" * 5000,
    ),
)


@pytest.mark.parametrize(
    "command",
    [
        *((name, "a\udcff") for name in ("logs", "attach", "cancel", "status", "suspend")),
        *(("deploy", option, "a\udcff") for option in ("--directory", "--python")),
        ("run", "--detach", "--set", "steps=5", "--set", "name=a\udcff"),
    ],
    ids=" ".join,
)
def test_an_argument_that_is_no_text_is_refused_before_a_server_is_asked(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    result = call(*command)
    assert is_one_sentence(result)
    assert result.exit_code == 2
    name = command[1].strip("-") if command[0] == "deploy" else "run"
    name = "assignments" if command[0] == "run" else name
    assert result.stderr == (
        f"an argument ({name}) is not UTF-8, as names and settings have to be\n"
    )


@pytest.mark.parametrize(
    "command", [("deploy",), ("run", "--detach"), ("cancel", "x")], ids=lambda command: command[0]
)
@pytest.mark.parametrize("url", SERVERS, ids=range(len(SERVERS)))
def test_an_invalid_prefect_address_gives_one_sentence(
    command: tuple[str, ...], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    result = call(*command)
    assert is_one_sentence(result)
    assert result.exit_code == 2
    assert result.stderr.startswith("PREFECT_API_URL=")
    assert result.stderr.endswith(
        "is not the address of a server; write it as http://HOST:4200/api, or unset it\n"
    )
    assert len(result.stderr) < 300


@pytest.mark.parametrize("name", ["", "x" * 5000, "loop"])
@pytest.mark.parametrize("command", ["status", "down", "up", "doctor"])
def test_an_impossible_home_path_gives_one_sentence(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("ASTRAFLOW_HOME", name or str(tmp_path / "file"))
    result = call(command)
    assert is_one_sentence(result)
    assert result.exit_code == 2
    assert result.stderr.startswith("ASTRAFLOW_HOME=")
    assert "cannot be the stack's folder (" in result.stderr
    assert result.stderr.endswith("; name a writable one\n")
    assert len(result.stderr) < 500


@pytest.mark.parametrize("deployment", ["\x1b[2J", "x" * 5000, "a\0b/c", "nobody"])
def test_an_impossible_deployment_name_gives_one_sentence(deployment: str) -> None:
    assert is_one_sentence(call("run", deployment))


@pytest.mark.parametrize(
    "url", ["file://host/store", "file://[", "://", "s3://", "ftp://x", "s3://a:secret@b"]
)
@pytest.mark.parametrize("command", [("runs",), ("status", "x"), ("gc", "x")])
def test_an_impossible_store_url_gives_one_sentence(
    command: tuple[str, ...], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", url)
    assert is_one_sentence(call(*command))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a store with one run."""
    small_run = SmallRun(f"hostile-input-{tmp_path}")
    small_run.version("solver", 0)
    for key in small_run.run.list():
        file = tmp_path / "store" / "runs" / "tiny-1" / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(small_run.run.get(key))
    return tmp_path / "store"


ON_A_RUN = (
    *(
        ("tag", "tiny-1", "solver@0", name)
        for name in ("../x", "", "a b", "\x1b", "5", "x\0", "\ud800")
    ),
    *(
        ("tag", "tiny-1", version, "best")
        for version in ("solver", "solver@", "@1", "solver@-1", "../x@0", "solver@" + "9" * 50)
    ),
    *(("tag", "tiny-1", "--remove", name) for name in ("../x", "nobody", "\x1b")),
    *(
        ("gc", "tiny-1", "--keep", version)
        for version in ("solver", "nobody@1", "solver@99", "../x@0")
    ),
    *(("export", "tiny-1", policy, "--out", "out") for policy in ("nobody", "../x", "\x1b")),
    *(
        ("export", "tiny-1", "solver", "--out", "out", "--version", version)
        for version in ("99", "nobody", "-1", "../x", "9" * 30)
    ),
    *(
        (command, name)
        for command in ("status", "verify", "report", "weights")
        for name in ("../x", "\x1b[2J", "nobody", "a\0", "\ud800")
    ),
    *(
        ("report", "tiny-1", "--out", out)
        for out in ("/", "/no/such/folder/a.html", "/dev/full", "a\0b", "x" * 5000, "\ud800")
    ),
)


@pytest.mark.parametrize("arguments", ON_A_RUN, ids=range(len(ON_A_RUN)))
def test_a_hostile_argument_of_a_run_command_gives_one_sentence(
    run: Path, arguments: tuple[str, ...]
) -> None:
    assert is_one_sentence(call(*arguments))


WITH_A_PATH = (
    ("report", "tiny-1", "--out"),
    ("export", "tiny-1", "solver", "--out"),
    ("compare", "tiny-1", "tiny-2", "--out"),
    ("episodes", "tiny-1", "--page"),
    ("nights", "tiny", "--out"),
    ("deploy", "--pools"),
)


@pytest.mark.parametrize("arguments", WITH_A_PATH, ids=[names[0] for names in WITH_A_PATH])
def test_an_address_is_refused_in_the_place_of_a_local_path_and_not_repeated(
    run: Path, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, "s3://key:secret@host/x?token=abc")
    assert (result.exit_code, is_one_sentence(result)) == (2, True)
    assert "begins with s3:// is an address; name a file or folder of this mach" in result.stderr
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("out", ["./nights:/report.html", "nights:/report.html"])
def test_a_folder_whose_name_ends_with_a_colon_is_a_local_path(
    run: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nights:").mkdir()
    result = call("report", "tiny-1", "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / "nights:" / "report.html").stat().st_size > 0


LONG_NAMES = (
    *(
        ("cancel", "x"),
        ("status", "x"),
        ("weights", "tiny-1", "x"),
        ("tag", "x"),
        ("tag", "tiny-1", "x@0", "best"),
    ),
    *(
        ("export", "tiny-1", "solver", "--out", "x"),
        ("export", "tiny-1", "solver", "--version", "x", "--out", "o"),
        ("gc", "x"),
    ),
    ("report", "tiny-1", "--out", "x"),
)


@pytest.mark.parametrize("arguments", LONG_NAMES, ids=range(len(LONG_NAMES)))
def test_a_name_of_100_000_letters_is_not_repeated(run: Path, arguments: tuple[str, ...]) -> None:
    result = call(
        *(
            "x" * 100_000 if argument == "x" else argument.replace("x@", "x" * 100_000 + "@")
            for argument in arguments
        )
    )
    assert is_one_sentence(result)
    assert len(result.stderr) < 1_000
    assert "x" * 50 in result.stderr


def test_a_report_is_written_into_a_pipe_only_when_it_has_a_reader(
    run: Path,
) -> None:
    pipe = _pipe("pipe")
    result = call("report", "tiny-1", "--out", pipe)
    assert (result.exit_code, result.stderr) == (
        2,
        "pipe cannot be written (No such device or address); name a file in a writable folder\n",
    )
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    while call("report", "tiny-1", "--out", pipe).exit_code:
        assert reader.poll() is None
    page, _ = reader.communicate()
    assert page.startswith(b"<!doctype html>")
    assert page.rstrip().endswith(b"</html>")


@pytest.mark.parametrize(
    "arguments",
    [("weights", "tiny-1"), ("runs", "--json"), ("status", "tiny-1")],
    ids=lambda item: item[0],
)
def test_a_command_ends_quietly_when_the_reader_of_its_pipe_has_gone(
    run: Path, arguments: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deployments.cli.app", *arguments]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(
    "arguments", [("weights", "tiny-1"), ("--help",)], ids=lambda item: item[0]
)
def test_a_full_output_device_gives_one_sentence(run: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "deployments.cli.app", *arguments]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (result.returncode, result.stderr) == (
        1,
        "the output, or another open file: No space left on device\n",
    )


def test_a_full_disk_is_reported_with_the_file(run: Path) -> None:
    result = call("report", "tiny-1", "--out", "/dev/full")
    assert (result.exit_code, result.stderr) == (
        2,
        "/dev/full cannot be written (No space left on device); name a file in a writable folder\n",
    )


def test_a_disk_that_fills_up_leaves_the_earlier_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "reports" / "page.html"
    page.parent.mkdir()
    page.write_text("the earlier one")

    def fill_up(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:10].encode(encoding))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fill_up)
        result = call("report", "tiny-1", "--out", str(page))
    assert (result.exit_code, result.stderr) == (
        2,
        f"{page} cannot be written (No space left on device); name a file in a writable folder\n",
    )
    assert page.read_text() == "the earlier one"
    assert os.listdir(page.parent) == [page.name]


def test_a_report_is_written_to_the_standard_output_of_a_pipe(run: Path) -> None:
    command = [sys.executable, "-m", "deployments.cli.app", "report", "tiny-1"]
    result = subprocess.run([*command, "--out", "/dev/stdout"], capture_output=True, check=False)
    assert result.returncode == 0
    assert result.stdout.startswith(b"<!doctype html>")


def test_a_report_is_written_into_a_file_without_a_name(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deployments.cli.app", "report", "tiny-1"]
    with TemporaryFile(dir=tmp_path) as output:
        subprocess.run([*command, "--out", "/dev/stdout"], stdout=output, check=True)
        output.seek(0)
        assert output.read().rstrip().endswith(b"</html>")


def test_a_report_keeps_the_mode_of_the_file_that_it_replaces(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.touch(0o640)
    page.chmod(0o640)
    assert call("report", "tiny-1", "--out", str(page)).exit_code == 0
    assert page.stat().st_mode & 0o777 == 0o640


def test_a_page_is_written_into_a_file_whose_folder_cannot_be_written(tmp_path: Path) -> None:
    page = tmp_path / "pages" / "page.html"
    page.parent.mkdir()
    page.write_text("the earlier one")

    def work() -> None:
        page.parent.chmod(0o555)
        write_text(page, "new")
        assert page.read_text() == "new"

    as_ordinary_user(tmp_path, work)


def test_the_report_of_a_store_that_cannot_be_written_is_written_to_the_named_file(
    run: Path, tmp_path: Path
) -> None:
    page, stored = tmp_path / "page.html", run / "runs" / "tiny-1"
    assert call("report", "tiny-1").exit_code == 0  # the other user may not read what it imports
    (stored / "report.html").unlink()

    def work() -> None:
        stored.chmod(0o555)
        result = call("report", "tiny-1", "--out", str(page))
        stored.chmod(0o755)
        assert (result.exit_code, result.stdout) == (0, f"{page}\n")
        assert result.stderr.startswith("the report is not stored with the run: ")
        assert f"{stored}/report.html" in result.stderr
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert not (stored / "report.html").exists()

    as_ordinary_user(tmp_path, work)


def test_a_report_replaces_what_a_link_names(run: Path, tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("the earlier one")
    link.symlink_to(page)
    assert call("report", "tiny-1", "--out", str(link)).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert link.is_symlink()


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_the_report_is_written_in_any_locale_and_messages_replace_other_letters(
    run: Path, tmp_path: Path, locale: dict[str, str]
) -> None:
    environment = {**os.environ, **locale}
    written: list[bytes] = []
    for arguments in (
        ["report", "tiny-1", "--out", "page.html"],
        ["report", "tiny-1", "--out", "/dev/stdout"],
        ["weights", "tiny-1"],
    ):
        result = subprocess.run(
            [sys.executable, "-m", "deployments.cli.app", *arguments],
            env=environment,
            capture_output=True,
            cwd=tmp_path,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, b"")
        written.append(result.stdout)
    assert "·" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "·" in written[1].decode("utf-8")


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60) | st.text("[]{}:,&*!|>-?'\"#%@ \n\tab01.<", max_size=60))
def test_any_text_is_a_document_or_an_error_that_names_it(text: str) -> None:
    message = "the text"
    try:
        read(text, "the text")
    except ConfigError as error:
        message = str(error)
    assert message.startswith("the text")


def test_the_maximum_number_of_values_is_read_and_one_more_is_refused() -> None:
    most = yaml_file.VALUES_MAX
    assert len(read("\n".join(f"k{number}: 1" for number in range(most)), "t").lines) == most
    with pytest.raises(ConfigError, match=f"t, line {most + 1}: more than 10,000 values"):
        read("\n".join(f"k{number}: 1" for number in range(most + 1)), "t")


OF_ALIASES = f"a: &a [{'x, ' * 100}]\nb: [{'*a, ' * 98}]\n"  # 101 values, and 99 + 98 * 100
LARGEST = {
    "bytes": (
        "a: é # " + "é" * 99_996,
        "x",
        "t: larger than 200,000 bytes; a recipe is a page of settings",
    ),
    "values with aliases expanded": (
        OF_ALIASES,
        "c: 1",
        "t, line 3: more than 10,000 values; do its aliases (*) multiply them?",
    ),
    "levels": ("- " * 32, "- x", "t, line 1: nested deeper than 32 sections"),
}


@pytest.mark.parametrize(("most", "more", "message"), LARGEST.values(), ids=LARGEST.keys())
def test_a_text_at_a_limit_is_read_and_a_larger_one_is_refused(
    most: str, more: str, message: str
) -> None:
    assert read(most, "t").value
    with pytest.raises(ConfigError) as refused:
        read(most + more, "t")
    assert str(refused.value) == message


@pytest.mark.parametrize("character", ["\0", "\x1b", "\x7f", "\ud800"], ids=ascii)
def test_a_character_that_no_text_has_is_named_with_its_line(character: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"a: 1\nb: x{character}\n", "t")
    assert str(refused.value) == (
        f"t, line 2: not valid YAML: the character U+{ord(character):04X} cannot stand in a text; "
        "remove it"
    )


@pytest.mark.parametrize("name", ["auth", "stack.json", "stack.lock", "logs/worker-control.log"])
@pytest.mark.parametrize("command", ["up", "run"])
def test_a_pipe_in_place_of_a_file_of_the_home_is_named_without_blocking(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "logs").mkdir()
    os.mkfifo(home / name)
    monkeypatch.setenv("ASTRAFLOW_HOME", str(home))
    result = call(command)
    assert (result.exit_code, result.stderr) == (
        2,
        f"{home / name} is not a regular file, and the stack keeps a file there; delete it\n",
    )


TRACKING = {
    "nonsense": "it has no scheme",
    "mlflow.example": "it has no scheme",
    "./mlruns": "it has no scheme",
    "ftp://x": "MLflow has no scheme 'ftp'",
    "mlflow.example:5000": "MLflow has no scheme 'mlflow.example'",
    "http://": "host or port is missing or wrong",
    "http:x": "host or port is missing or wrong",
    "https://a b": "host or port is missing or wrong",
    "http://127.0.0.1:99999": "host or port is missing or wrong",
    "http://[": "host or port is missing or wrong",
    "file:///\x1b[2J": "it contains control characters",
}


@pytest.mark.parametrize("command", [("deploy",), ("run", "--detach"), ("up",)])
@pytest.mark.parametrize("uri", TRACKING)
def test_an_unusable_mlflow_address_is_refused_before_anything_starts(
    command: tuple[str, ...], uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    result = call(*command)
    shown = uri.replace("\x1b", "")
    assert (result.exit_code, result.stderr) == (
        2,
        f"MLFLOW_TRACKING_URI={shown} is not an address of MLflow ({TRACKING[uri]}); write it as "
        "http://HOST:5000, or unset it to use a local server\n",
    )


@pytest.mark.parametrize("command", [("deploy",), ("run", "--detach"), ("up",)])
def test_an_mlflow_address_with_a_password_is_refused_before_anything_starts(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@mlflow.example")
    result = call(*command)
    assert is_one_sentence(result)
    assert result.stderr.startswith(
        "MLFLOW_TRACKING_URI contains a credential beside the address http://mlflow.example, "
    )


USAGE_ERRORS = (
    ("run", "--\x1b[2Jx"),
    ("run", "a", "http://me:secret@host/x"),
    ("run", "--detach", "--http://me:secret@host"),
    ("run", "--" + "x" * 100_000),
    ("run", "a", "x" * 250 + " http://me:secret" + "x" * 100 + "@host"),
    ("run", "a", "http://me:secret" + "x" * 2_000 + "@host"),
    ("gc", "x", "--last", "\x1b[2J"),
    ("\x1b[2J",),
    ("x" * 100_000,),
    ("runs", *["y"] * 5_000),
)


@pytest.mark.parametrize("arguments", USAGE_ERRORS, ids=range(len(USAGE_ERRORS)))
def test_wrong_arguments_are_repeated_short_and_without_escapes_or_credentials(
    arguments: tuple[str, ...],
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert is_one_sentence(result)
    assert len(result.stderr) < 500
    assert re.search(r"; see `\S+( run| gc| runs)? --help`\n$", result.stderr)


def test_errors_print_addresses_without_passwords() -> None:
    result = call("run", "a", "see s3://key:secret@bucket, (https://me:secret@host/path)")
    assert result.stderr == (
        "Got unexpected extra argument(s) (see s3://bucket, (https://host/path)); see "
        "`root run --help`\n"
    )
