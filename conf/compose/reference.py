"""Every setting and every group, as one page of Markdown, made from `schema.py` and the YAML files.

    python -m conf.compose.reference [FILE]        FILE is docs/settings.md; without it the page is printed

A setting's meaning is the comment behind it in the schema, so there is one place to write it.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import omegaconf

from conf import schema
from conf.schema import RunConfig

FOLDER = Path(__file__).parents[1]
# A field on one line, or with its default on the next one, where the formatter put it.
FIELD = re.compile(r"^class (?P<owner>\w+)|^    (?P<name>\w+): [^#\n]*(?:\(\n +[^#\n]*)?# *(?P<comment>.*)$", re.MULTILINE)
HEAD = """# Settings

Made by `python -m conf.compose.reference docs/settings.md` from [schema.py](../conf/schema.py) and the YAML files: write there.
Any key can be given on the command line, `python -m launch experiment=debug trainer.steps=5`, and a preset of a group by its
name, `rollout=synchronous`; where both it and the experiment set a key, the launcher asks which is meant. What is composed is
checked before anything starts ([check.py](../conf/compose/check.py)), and the result lies in each run's `config.yaml`.

Units are in the names (`_s`, `_tokens`, `_bytes`) or in the meaning. Secrets are no settings: a run's own keys lie in its
folder's `keys/`, those of others (Weights & Biases: `WANDB_API_KEY`) come through the environment, and a setting that holds the
value of such a variable, or gives one to such a name, is refused ([secrets.py](../conf/compose/secrets.py)).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    key: str
    type: str
    default: str
    meaning: str


def page() -> str:
    parts = [HEAD, "## Groups\n", *_table(("group", "member", "what"), _members())]
    for section in ("", *(item.name for item in fields(RunConfig) if is_dataclass(get_type_hints(RunConfig)[item.name]))):
        rows = [(f"`{s.key}`", s.type, s.default, s.meaning) for s in settings() if _section(s.key) == section]
        parts += [f"\n## {section or 'The run'}\n", *_table(("key", "type", "default", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def settings() -> list[Setting]:
    return list(_settings(RunConfig, ""))


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else ""


def _settings(kind: type, prefix: str) -> Iterator[Setting]:
    hints, comments = get_type_hints(kind), _comments()
    for item in fields(kind):
        hint, key = hints[item.name], prefix + item.name
        if is_dataclass(hint):
            yield from _settings(hint, f"{key}.")  # type: ignore[arg-type]
            continue
        meaning = comments.get((kind.__name__, item.name), "")
        yield Setting(key=key, type=_type_name(hint), default=_default(item), meaning=meaning)


def _comments() -> dict[tuple[str, str], str]:
    """(class, field) -> the comment behind the field."""
    found, owner = {}, ""
    for match in FIELD.finditer(Path(schema.__file__).read_text()):
        if match["owner"]:
            owner = match["owner"]
        else:
            found[owner, match["name"]] = match["comment"]
    return found


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and hint is not list and not hasattr(hint, "__args__") else str(hint)


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if value == omegaconf.MISSING:
        return "must be given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"`{value}`"


def _members() -> Iterator[tuple[str, str, str]]:
    """A group is a folder, a member a file in it; what it is says its first comment."""
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir() and list(path.glob("*.yaml"))):
        for file in sorted(folder.glob("*.yaml")):
            yield f"`{folder.name}`", f"`{file.stem}`", describe(file)


def describe(file: Path) -> str:
    """The comment that a YAML file opens with, in one line."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for cells in rows:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        yield f"| {' | '.join(escaped)} |"


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if len(arguments) > 1:
        print("usage: python -m conf.compose.reference [FILE]", file=sys.stderr)
        return 2
    if arguments:
        Path(arguments[0]).write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
