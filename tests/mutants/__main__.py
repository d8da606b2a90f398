"""Measure which small mutations of the code make a test fail.

Example: `make mutants ARGS="--sample 200 --seed 0 storage/coordination"`. Trials run in copies of
the tree, in as many processes as there are CPUs. `docs/testing.md` explains the output.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from multiprocessing.queues import Queue
from pathlib import Path

from tests.mutants import trials
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.trials import Tests

PACKAGES = ("storage", "data_ops", "trainer")
LISTED = Path(__file__).with_name("equivalent.toml")
REACHES = ("near", "direct", "far")
"""Test files of a module: its own ones; others that import it; those that import such a module."""
FATES = ("noticed", "survived", "not covered", "listed")
_roots: list[Path] = []
"""The copy of the tree of this worker process."""


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    fate: str
    by: str = ""
    """The test that noticed the mutant, or the reason of a listed one."""
    num_tests: int = 0

    def after(self, earlier: "Outcome") -> "Outcome":
        """Combine the outcomes of two trials with different tests."""
        fate = earlier.fate if self.fate == "not covered" else self.fate
        return replace(self, fate=fate, num_tests=earlier.num_tests + self.num_tests)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths",
        nargs="*",
        default=list(PACKAGES),
        help="modules or folders (default: storage data_ops trainer)",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=100,
        help="how many mutants, drawn at random (default 100; 0: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="mutants tried at a time (default: CPUs)",
    )
    parser.add_argument("--function", default="", help="only mutants within this function or class")
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    parser.add_argument(
        "--reach",
        choices=REACHES,
        default=REACHES[-1],
        help="test files that survivors are tried with: those named for the module, others that "
        "import it, or also those that import a module which imports it (default: far)",
    )
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    args = parser.parse_args(arguments)
    sources = {path: Path(path).read_text() for path in _files(args.paths)}
    drawn = [
        item
        for path, source in sources.items()
        for item in mutants(path, source)
        if item.function.startswith(args.function)
    ]
    num_all, listed = len(drawn), _read_listed()
    names = {
        _key(item, sources[item.path])
        for item in drawn
        if item.path in {path for path, *_ in listed}
    }
    for path, function, before, after in listed.keys() - names:
        if path in sources and function.startswith(args.function):
            print(
                f"{LISTED.name} lists what is no mutant any more: {path} {function}\n  - "
                f"{before}\n  + {after}"
            )
    if 0 < args.sample < num_all:
        drawn = sorted(
            random.Random(args.seed).sample(drawn, args.sample),
            key=lambda item: (item.path, item.start, item.text),
        )
    print(
        f"{len(drawn)} of {num_all} mutants of {len(sources)} files, seed {args.seed}", flush=True
    )
    if args.list:
        print("\n".join(_diff(item, sources[item.path]) for item in drawn))
        return 0
    outcomes = [
        Outcome(item, "listed", listed[key])
        for item in drawn
        if (key := _key(item, sources[item.path])) in listed
    ]
    known = {outcome.mutant for outcome in outcomes}
    outcomes += _tried(
        [item for item in drawn if item not in known], sources, args.jobs, args.reach
    )
    outcomes.sort(
        key=lambda outcome: (outcome.mutant.path, outcome.mutant.start, outcome.mutant.text)
    )
    for outcome in outcomes:
        if outcome.fate in ("survived", "not covered"):
            print(
                f"\n{outcome.fate}, {outcome.num_tests} "
                f"tests\n{_diff(outcome.mutant, sources[outcome.mutant.path])}"
            )
    print(f"\n{_table(outcomes)}")
    if args.json:
        args.json.write_text(json.dumps([_row(outcome, sources) for outcome in outcomes], indent=1))
    return 0


def _files(paths: Iterable[str]) -> list[str]:
    results = [
        file
        for path in map(Path, paths)
        for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))
    ]
    if not results:
        raise SystemExit(
            f"no Python files in {' '.join(paths)}; name files or folders of the rooms"
        )
    return [file.as_posix() for file in dict.fromkeys(results)]


def _tried(
    drawn: Sequence[Mutant], sources: dict[str, str], jobs: int, reach: str
) -> list[Outcome]:
    """Try mutants with the test files of their modules, and survivors with more and more others."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        context = multiprocessing.get_context("fork")
        roots: Queue[Path] = context.Queue()
        for number in range(jobs):
            root = Path(folder, str(number))
            _copy_tree(root)
            roots.put(root)
        test_files = trials.importing(Path(folder, "0"))
        trials.preload()
        with context.Pool(jobs, _begin, (roots,)) as pool:
            tried = {item: Outcome(item, "not covered") for item in drawn}
            for level in REACHES[: REACHES.index(reach) + 1]:
                left = [item for item, outcome in tried.items() if outcome.fate != "noticed"]
                wanted = {
                    path: [
                        file
                        for file, imports in test_files.items()
                        if _reach(file, imports, path) == level
                    ]
                    for path in {item.path for item in left}
                }
                result = _baselines(
                    pool, sorted({file for of_path in wanted.values() for file in of_path})
                )
                of_path = {
                    path: {file: result[file] for file in files} for path, files in wanted.items()
                }
                work = [(item, sources[item.path], of_path[item.path]) for item in left]
                for number, outcome in enumerate(pool.imap_unordered(_try, work), start=1):
                    tried[outcome.mutant] = outcome.after(tried[outcome.mutant])
                    shown = (
                        f"{outcome.mutant.path}:{outcome.mutant.line} {outcome.fate} {outcome.by}"
                    )
                    print(
                        f"{level} {number}/{len(left)} {shown}",
                        file=sys.stderr,
                        flush=True,
                    )
    return list(tried.values())


def _baselines(pool: Pool, files: Sequence[str]) -> dict[str, Tests]:
    start_s = time.monotonic()
    results = dict(zip(files, pool.map(_baseline, files, chunksize=1), strict=True))
    print(f"{len(files)} test files, unchanged, in {time.monotonic() - start_s:.0f} s", flush=True)
    for file, tests in results.items():
        if not tests.passed:
            print(f"left out, because it fails unchanged: {file}\n{tests.output}", flush=True)
    return results


def _reach(file: str, imports: Mapping[str, bool], path: str) -> str:
    """Which of REACHES the test file has for the module `path`; empty for none."""
    module = path.removesuffix(".py").replace("/", ".")
    if module not in imports:
        return ""
    if file in trials.nearest(path):
        return "near"
    return "direct" if imports[module] else "far"


def _copy_tree(root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], check=True, capture_output=True
    ).stdout
    for name in listed.decode().split("\0"):
        if name and Path(name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name)


def _begin(roots: "Queue[Path]") -> None:
    _roots.append(roots.get())


def _baseline(file: str) -> Tests:
    return trials.baseline(_roots[0], file)


def _try(work: tuple[Mutant, str, dict[str, Tests]]) -> Outcome:
    mutant, source, result = work
    root = _roots[0]
    target, reached = root / mutant.path, root / ".reached"
    function = (mutant.path, *mutant.code) if mutant.code and mutant.can_be_probed else None
    tests, cpu_s = trials.chosen(result, function)
    if not tests:
        return Outcome(mutant, "not covered")
    reached.unlink(missing_ok=True)
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        compiled.unlink()
    try:
        probed = mutant.probed(source, str(reached))
        target.write_text(probed)
        by = trials.trial(root, tests, cpu_s)
    finally:
        target.write_text(source)
    unreached = probed != mutant.applied(source) and not reached.exists()
    return Outcome(
        mutant, "noticed" if by else "not covered" if unreached else "survived", by, len(tests)
    )


def _key(mutant: Mutant, source: str) -> tuple[str, str, str, str]:
    return mutant.path, mutant.function, *mutant.change(source)


def _read_listed() -> dict[tuple[str, str, str, str], str]:
    entries = tomllib.loads(LISTED.read_text()).get("mutant", [])
    return {
        (item["file"], item["function"], item["before"], item["after"]): item["reason"]
        for item in entries
    }


def _diff(mutant: Mutant, source: str) -> str:
    before, after = mutant.change(source)
    return f"{mutant.path}:{mutant.line} {mutant.function}\n  - {before}\n  + {after}"


def _row(outcome: Outcome, sources: dict[str, str]) -> dict[str, object]:
    path, function, before, after = _key(outcome.mutant, sources[outcome.mutant.path])
    place = {
        "file": path,
        "line": outcome.mutant.line,
        "function": function,
        "before": before,
        "after": after,
    }
    return {**place, "fate": outcome.fate, "by": outcome.by, "num_tests": outcome.num_tests}


def _table(outcomes: Iterable[Outcome]) -> str:
    """Return a line for each file, for each package, and for the total."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        for name in (outcome.mutant.path, f"{outcome.mutant.path.split('/')[0]}/", "all"):
            counts[name][outcome.fate] += 1
    lines = [
        "| file | noticed | survived | not covered | listed | share noticed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in sorted(counts, key=lambda name: (name == "all", name.endswith("/"), name)):
        tried = sum(counts[name][fate] for fate in FATES[:3])
        share = f"{counts[name]['noticed'] / tried:.0%}" if tried else ""
        lines.append(
            f"| {name} | {' | '.join(str(counts[name][fate]) for fate in FATES)} | {share} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
