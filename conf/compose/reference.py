"""Every setting and every group, as one page of Markdown, made from `schema.py` and the YAML files.

    python -m conf.compose.reference [FILE]        FILE is docs/settings.md; without it the page is printed

The meaning of a setting and the values that it takes are read from the schema.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any

import omegaconf

from conf.schema import RULE, Rule, RunConfig, settings

FOLDER = Path(__file__).parents[1]
HEAD = """# Settings

This page is made by `python -m conf.compose.reference docs/settings.md` from `conf/schema.py` and the YAML files in `conf/`.
Change those, not this page.

Set any key on the command line, as in `python -m launch experiment=debug trainer.steps=5`. Choose a preset of a group by its
name, as in `rollout=synchronous`. If a preset and the experiment both set a key, the launcher refuses to start and asks which
value you want. All settings are checked before anything starts. The result is written to `config.yaml` in the run's folder,
without `plan.*` and `model.shape.*`, which only the planner reads.

Units are in the names (`_s`, `_tokens`, `_bytes`) or in the meaning. A secret must not be a setting, because settings are
written down. The run's own keys are in its folder, in `keys/`. Keys of other services (Weights & Biases: `WANDB_API_KEY`) come
from the environment. A setting that contains such a value is refused.
"""


def page() -> str:
    sections = {item.name: item.default_factory for item in fields(RunConfig) if is_dataclass(item.default_factory)}
    parts = [HEAD, "## Presets\n", *_table(("group", "preset", "what it is"), _presets())]
    for section, kind in {"": RunConfig, **sections}.items():
        rows = [
            (f"`{key}`", _type_name(hint), _default(item), _meaning(item.metadata[RULE]))
            for key, hint, item in settings()
            if _section(key) == section
        ]
        parts += [f"\n## {section or 'run'}\n", f"{getdoc(kind)}\n", *_table(("key", "type", "default", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else ""


def _meaning(rule: Rule) -> str:
    """The meaning and the values that are taken."""
    choices = [f"""`{name or '""'}`: {meaning}""" for name, meaning in rule.choices.items()]
    own = ["`module:function`: a function of your own"] if rule.loaded_by else []
    return "<br>".join([rule.meaning + (f" ({rule.bounds})" if rule.bounds else ""), *choices, *own])


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if value == omegaconf.MISSING:
        return "must be given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"`{value}`"


def _presets() -> Iterator[tuple[str, str, str]]:
    """Each YAML file in each folder of conf/, with the comment that it begins with."""
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir() and list(path.glob("*.yaml"))):
        for file in sorted(folder.glob("*.yaml")):
            yield f"`{folder.name}`", f"`{file.stem}`", describe(file)


def describe(file: Path) -> str:
    """The comment at the beginning of a YAML file, in one line."""
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


def write_page(make: Callable[[], str], description: str | None) -> None:
    """The command line of a module that makes a page of the documentation: writes it into the named file, or prints it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    file = parser.parse_args().file
    text = make()
    if file is None:
        print(text, end="")
    else:
        file.write_text(text)


if __name__ == "__main__":
    write_page(page, __doc__)
