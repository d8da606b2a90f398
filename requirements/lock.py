"""Write the requirement files with exact versions from pyproject.toml (`make lock`). Needs uv.

    pyproject.toml ──uv──▶ one resolution ─┬▶ locked.txt  all but torch, with SHA-256 of each file
                                           ├▶ cuda.txt    packages of torch's CUDA build only
                                           └▶ torch.txt   torch's version alone: its files differ
                                                          from index to index

One resolution is valid for Linux and macOS and for every Python that pyproject.toml allows. Another
one is that of the extra `docs`, in docs.txt. A version is kept until pyproject.toml excludes it;
delete its line or use `--upgrade` to get a newer one.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
PYPROJECT = FOLDER.parent / "pyproject.toml"
FILES = ("locked.txt", "cuda.txt", "torch.txt")
EXTRAS = ("dev", "s3", "dask", "postgres", "mlflow-auth")
OLDEST_PYTHON = "3.11"
CUDA = re.compile(r"(nvidia-|cuda-|triton$)")
"""Names of packages that only a build of torch with CUDA depends on."""
COMPILE = (
    *("uv", "pip", "compile", "--universal", "--python-version", OLDEST_PYTHON),
    *("--generate-hashes", "--no-header", "--no-annotate", "--only-binary", ":all:"),
)
HEADERS = {
    "locked.txt": "# Written by `make lock`. "
    "Every package but torch, for `pip install --require-hashes -r`.\n",
    "cuda.txt": "# Written by `make lock`. "
    "What a torch with CUDA needs besides, for `pip install --require-hashes -r`.\n",
    "torch.txt": "# Written by `make lock`. "
    "Without hashes: the files of one version differ from index to index.\n",
}


def main(options: list[str]) -> None:
    """Resolve and write the files; `options` are passed to `uv pip compile`."""
    with tempfile.TemporaryDirectory() as folder:
        build, resolved = Path(folder) / "build.in", Path(folder) / "resolved.txt"
        build.write_text(
            "\n".join(tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"])
        )
        resolved.write_text("".join((FOLDER / name).read_text() for name in FILES))
        extras = [part for extra in EXTRAS for part in ("--extra", extra)]
        command = [*COMPILE, *extras, *options, "--output-file", str(resolved)]
        subprocess.run(
            [*command, str(PYPROJECT), str(build)], check=True, stdout=subprocess.DEVNULL
        )
        lock_docs(Path(folder) / "docs.in", options)
        entries = re.split(r"^(?=[A-Za-z])", resolved.read_text(), flags=re.MULTILINE)
    for name, text in split(entry for entry in entries if entry).items():
        (FOLDER / name).write_text(HEADERS[name] + text)


def lock_docs(wanted: Path, options: list[str]) -> None:
    """Resolve the packages of `make docs`, which have an environment of their own."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    wanted.write_text("\n".join(extras["docs"]))
    path = FOLDER / "docs.txt"
    command = [*COMPILE, *options, "--output-file", str(path), str(wanted)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path.write_text("# Written by `make lock`. For `make docs`.\n" + path.read_text())


def split(entries: Iterable[str]) -> dict[str, str]:
    """Return file → its entries, from entries `torch==2.13.0 \\\n    --hash=sha256:…`."""
    texts = dict.fromkeys(FILES, "")
    for entry in entries:
        name = entry.partition("==")[0]
        if name == "torch":
            texts["torch.txt"] += entry.split()[0] + "\n"
        else:
            texts["cuda.txt" if CUDA.match(name) else "locked.txt"] += entry
    return texts


if __name__ == "__main__":
    main(sys.argv[1:])
