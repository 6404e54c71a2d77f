"""Turns an error of Hydra or OmegaConf into one line that names the setting and says what to do."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import (
    ConfigTypeError,
    InterpolationValidationError,
    OmegaConfBaseException,
    ValidationError,
)

from conf.compose.other_names import OTHER_NAMES
from conf.compose.presets import EXPERIMENT, experiments
from conf.schema import ConfigError, RunConfig

TYPED_WORD = re.compile(r"Error merging override (.*)")
NO_PRESET = re.compile(r"Could not find '([^']+)/([^'/]+)'")
PRESETS = re.compile(r"Available options in '[^']+':((?:\n\t\S+)+)")
AMBIGUOUS_VALUE = re.compile(r"Ambiguous value for argument '([^'=]+)=([^']*)'")
ADDED_AGAIN = re.compile(r"An item is already at '([^']+)'")
OVERRIDDEN = re.compile(r"Could not override '([^']+)'")
FULL_KEY = re.compile(r"full_key: (\S+)")
UNKNOWN_KEY = re.compile(r"not in struct|Key '[^']*' not in")
SIMPLE_KEY = re.compile(r"[+~]?[\w./@]+")
SHORT = 4  # a word of so few letters resembles many settings by chance
BRACKETS_AND_QUOTES = set("[]{}\"'")
FOR_DEVELOPERS = (
    "full_key:", "object_type=", "reference_type=", "To append to your config", "Could not override", "Error merging",
    "Config search path", "provider=",
)  # fmt: skip
EXPECTED: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts, as in {key}=[a,b]",
}


def kinds(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every setting and every group of settings by its key, with its type."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        found[prefix + name] = kind
        if is_dataclass(kind):
            found |= kinds(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


SETTINGS: Mapping[str, Any] = kinds(RunConfig)


@contextmanager
def in_one_line(settings: Mapping[str, Any] = SETTINGS) -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, settings)) from error


def wrong_type(key: str, said: str, kind: Any) -> str:
    """The message for a value of a wrong type; `said` is the setting and the value that was given."""
    if is_dataclass(kind):
        return f"{said}: {key} is a group of settings; set them one by one, as in {key}.{fields(kind)[0].name}=…"
    return f"{said}: must be {EXPECTED[kind].format(key=key)}"


def _one_line(error: BaseException, settings: Mapping[str, Any]) -> str:
    """The error and its causes, without what only developers of Hydra need."""
    text = "\n".join(str(cause) for cause in _causes(error))
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as KEY=VALUE ({text.splitlines()[0]}){_quoted(error.override or '')}"
    if "You must specify" in text:
        named = ", ".join(f"experiment={name}" for name in experiments())
        return f"choose an experiment, one of {named}; or a model and data, model=… data=…"
    if found := AMBIGUOUS_VALUE.search(text):
        key, values = found[1], found[2]
        return f"{key}={values}: one run takes one value. To start one run per value, put -m first; a list is {key}=[{values}]"
    if found := ADDED_AGAIN.search(text):
        return f"+{found[1]}: the setting exists, as all settings do; leave out the +"
    if (found := NO_PRESET.search(text)) and (listed := PRESETS.search(text)):
        presets = listed[1].split()
        close = difflib.get_close_matches(found[2], presets, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}? " if close else ""
        return f"{found[1]}={found[2]}: there is no such preset; {meant}the presets are {', '.join(presets)}"
    key = next((found[1] for pattern in (OVERRIDDEN, FULL_KEY) if (found := pattern.search(text))), "")
    if key and UNKNOWN_KEY.search(text):
        return f"{key}: no such setting{_suggestion(key, settings)}"
    return _mistyped(error, text, settings) or _shortened(key, text)


def _mistyped(error: BaseException, text: str, settings: Mapping[str, Any]) -> str | None:
    cause = next((cause for cause in _causes(error) if isinstance(cause, (ValidationError, ConfigTypeError))), None)
    key = re.sub(r"\[\d+\]$", "", (cause and cause.full_key) or "")  # the key of the list, not of its item
    if cause is None or key not in settings:
        return None
    if isinstance(cause, InterpolationValidationError):
        said = f"{key}=${{…}}"  # its value may be a secret
    else:
        said = f"{key}={'null' if cause.value is None else cause.value}"
        if (word := TYPED_WORD.search(text)) and word[1].lstrip("+~").startswith(key):
            said = word[1]  # as the user typed it
    if said.startswith("~"):
        return f"{said}: a setting cannot be removed; give it another value"
    return wrong_type(key, said, settings[key])


def _shortened(key: str, text: str) -> str:
    lines = dict.fromkeys(re.sub(r"^In '[^']*': ", "", line.strip()) for line in text.splitlines())
    said = " ".join(line for line in lines if line and not line.startswith(FOR_DEVELOPERS))
    return f"{key}: {said}" if key else said


def _quoted(word: str) -> str:
    """How to write a value that Hydra reads only in quotes, such as a path with a space or with letters beyond ASCII."""
    key, _, value = word.partition("=")
    if not value or not SIMPLE_KEY.fullmatch(key) or BRACKETS_AND_QUOTES & set(value):
        return ""
    return f"; put the value in quotes, and the whole word in quotes for the shell: '{key}=\"{value}\"'"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _suggestion(key: str, settings: Mapping[str, Any]) -> str:
    leaf = key.rpartition(".")[2]
    same_leaf = [setting for setting in settings if setting.rpartition(".")[2] == leaf]
    other = [setting for setting in [OTHER_NAMES.get(leaf.lower().replace("-", "_"), "")] if setting in settings]
    known = [setting for setting in (*settings, EXPERIMENT) if ("." in setting) == ("." in key)]
    meant = same_leaf or other or difflib.get_close_matches(key, known, n=1, cutoff=0.6 if len(key) > SHORT else 0.7)
    return f"; did you mean {' or '.join(meant)}?" if meant else ": docs/settings.md lists all settings"
