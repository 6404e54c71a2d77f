"""What Hydra and OmegaConf say about a user's mistake, as one line that names the setting and what to do."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf.schema import RunConfig

UserError = (HydraException, OmegaConfBaseException)

NO_MEMBER = re.compile(r"Could not find '([^']+)/([^'/]+)'")
MEMBERS = re.compile(r"Available options in '[^']+':((?:\n\t\S+)+)")
SEVERAL = re.compile(r"Ambiguous value for argument '([^'=]+)=([^']*)'")
NO_LIST = "is not a ListConfig"
OVERRIDDEN = re.compile(r"Could not override '([^']+)'")
FULL_KEY = re.compile(r"full_key: (\S+)")
UNKNOWN_KEY = re.compile(r"not in struct|Key '[^']*' not in")
PLAIN = re.compile(r"[+~]?[\w./@]+")
BRACKETS_AND_QUOTES = set("[]{}\"'")
FOR_PROGRAMMERS = (
    "full_key:", "object_type=", "reference_type=", "To append to your config", "Could not override", "Error merging",
    "Config search path", "provider=",
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """The error and its causes without what only a programmer of Hydra needs."""
    text = "\n".join(str(cause) for cause in _causes(error))
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as KEY=VALUE ({text.splitlines()[0]}){_quoted(error.override or '')}"
    if "You must specify" in text:
        return "choose an experiment (experiment=debug), or a model and data (model=… data=…)"
    if found := SEVERAL.search(text):
        key, values = found[1], found[2]
        return f"{key}={values}: one run takes one value; for a run each put -m before it, for a list write {key}=[{values}]"
    if (found := NO_MEMBER.search(text)) and (listed := MEMBERS.search(text)):
        members = listed[1].split()
        close = difflib.get_close_matches(found[2], members, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}? " if close else ""
        return f"{found[1]}={found[2]}: there is none of this name; {meant}there are {', '.join(members)}"
    key = next((found[1] for pattern in (OVERRIDDEN, FULL_KEY) if (found := pattern.search(text))), "")
    if key and UNKNOWN_KEY.search(text):
        return f"{key}: no such setting{_suggestion(key)}"
    if key and NO_LIST in text:
        return f"{key}: must be a list, as in {key}=[a,b]"
    lines = dict.fromkeys(re.sub(r"^In '[^']*': ", "", line.strip()) for line in text.splitlines())
    said = " ".join(line for line in lines if line and not line.startswith(FOR_PROGRAMMERS))
    return f"{key}: {said}" if key else said


def _quoted(word: str) -> str:
    """How to write a value that Hydra's grammar knows only in quotes: a blank, or letters beyond ASCII, in a path."""
    key, _, value = word.partition("=")
    if not value or not PLAIN.fullmatch(key) or BRACKETS_AND_QUOTES & set(value):
        return ""
    return f"; in quotes it can, the outer ones for the shell: '{key}=\"{value}\"'"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _suggestion(key: str) -> str:
    known = [*_keys(RunConfig), *(item.name for item in fields(RunConfig)), "experiment"]
    same_leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ": conf/schema.py lists them all"


def _keys(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    keys = []
    for item in fields(schema):
        kind = hints[item.name]
        keys += _keys(kind, f"{prefix}{item.name}.") if is_dataclass(kind) else [prefix + item.name]  # type: ignore[arg-type]
    return keys
