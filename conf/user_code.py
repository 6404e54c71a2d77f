"""Users' own code: a setting that takes it may name an object of the user's own module, as `module:object`.

    python -m launch experiment=debug algo.policy_loss=my_loss:dppo

The module is the file `my_loss.py`, or the package `my_loss/`, in the folder where the command is given. The launcher imports
it once, before anything expensive starts, copies it to `user_code/` in the run's folder, and writes its digest to `config.yaml`.
From then on the run uses its own copy, on every node and after every resume. Code in several files must be a package, because
only what is named is copied.

For a process of the run that needs such an object:

    if is_user_code(algo.policy_loss):
        loss = load(algo.policy_loss, run_dir, setting="algo.policy_loss")      # raises ConfigError with what is wrong

A setting takes user code when the schema says which process loads it. For the launcher there are `named`, `check`, `keep` and
`changes`; `python -m conf.user_code RUN SETTING=NAME …` tries to load names with the Python that will need them.
"""

import hashlib
import importlib
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import RULES, ConfigError, RunConfig, value_of

FOLDER = "user_code"
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
OUR_PACKAGES = ("conf", "launch", "reward", "rollout", "trainer")
USER_CODE_KINDS = {"python": "function", "environment": "environment"}  # kind of reward -> the field that names user code
CANNOT_LOAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A setting that names user code."""

    setting: str
    name: str
    role: str  # the process that loads it, as `trainer`


def is_user_code(value: str) -> bool:
    """Whether a setting's value names user code; no built-in name has a colon."""
    return ":" in value


def named(config: RunConfig) -> Iterator[Named]:
    """The settings of a configuration that name user code."""
    for key, rule in RULES.items():
        if rule.loaded_by:
            value = value_of(config, key)
            names = value if isinstance(value, list) else filter(is_user_code, [value])
            yield from (Named(setting=key, name=name, role=rule.loaded_by) for name in names)
    for name, part in config.reward.parts.items():
        if isinstance(part, dict) and (field := USER_CODE_KINDS.get(str(part.get("kind")))):
            yield Named(setting=f"reward.parts.{name}.{field}", name=str(part.get(field)), role="judge")


def load(name: str, run_dir: Path, *, setting: str) -> Callable[..., Any]:
    """The object that a setting names. Raises ConfigError with what is wrong, and where."""
    source = find(name, run_dir, setting=setting)
    module_name, _, attribute = name.partition(":")
    if str(source.parent) not in sys.path:
        sys.path.insert(0, str(source.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}={name}: {source} cannot be imported: {_last_line(error, source)}") from error
    imported = Path(module.__file__ or "")
    if source not in (imported, *imported.parents):
        raise ConfigError(f"{setting}={name}: the name {module_name} is taken by {imported}: rename {source}")
    if not hasattr(module, attribute):
        raise ConfigError(f"{setting}={name}: {imported} has no {attribute}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"{setting}={name}: {attribute} must be a function or a class; it is {type(found).__name__}")
    return found


def find(name: str, run_dir: Path, *, setting: str) -> Path:
    """The file or the folder of a module: the run's own copy, else that in the working folder. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{setting}={name}: must be module:object, as in my_module:my_function")
    top = _top(name)
    if top in OUR_PACKAGES:
        raise ConfigError(f"{setting}={name}: kestrel itself has a package {top}: give your module another name")
    folders = [(run_dir / FOLDER).resolve(), Path.cwd()]
    for folder in folders:
        if source := _source(folder, top):
            return source
    places = " or ".join(map(str, folders))
    raise ConfigError(f"{setting}={name}: there is no {top}.py, and no {top}/ with an __init__.py, in {places}")


def check(wanted: Sequence[Named], run_dir: Path) -> None:
    """Loads every name, and refuses a module that would miss its neighbours once it is copied. Raises ConfigError."""
    for one in wanted:
        load(one.name, run_dir, setting=one.setting)
    kept = {_top(one.name) for one in wanted}
    for module in {name.partition(".")[0] for name in sys.modules} - kept - set(OUR_PACKAGES):
        source = _source(Path.cwd(), module)
        if source and Path(getattr(sys.modules[module], "__file__", None) or "").is_relative_to(source):
            names = ", ".join(one.name for one in wanted)
            raise ConfigError(f"{names} imports {source}, which is not copied into the run's folder: put both into one package")


def keep(config: RunConfig, run_dir: Path) -> dict[str, str]:
    """Copies the named modules into the run's folder, where they are not there yet. Returns the digest of each by its name."""
    digests = {}
    for one in named(config):
        source = find(one.name, run_dir, setting=one.setting)
        copy = run_dir / FOLDER / source.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            unfinished = copy.with_name(f".{copy.name}")  # the copy is complete or absent, whenever this process is killed
            if source.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
                shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, unfinished)
            unfinished.rename(copy)
        digests[one.name] = _digest(copy)
    return digests


def changes(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """For a resumed run: one line for each module that has changed."""
    for one in named(config):
        source, here = find(one.name, run_dir, setting=one.setting), _source(Path.cwd(), _top(one.name))
        said = f"{one.setting}={one.name}"
        if config.user_code.get(one.name, digest := _digest(source)) != digest:
            yield f"{said}: {source} has changed since the run last started; the changed code is used"
        elif here and _digest(here) != digest:
            yield f"{said}: {here} differs from the run's own copy, {source}, which is used; to change the run, replace the copy"


def _source(folder: Path, top: str) -> Path | None:
    if (folder / top / "__init__.py").is_file():
        return folder / top
    file = folder / f"{top}.py"
    return file if file.is_file() else None


def _top(name: str) -> str:
    return re.split("[.:]", name)[0]


def _digest(source: Path) -> str:
    files = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for file in files if source.is_dir() else [source]:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(source.parent)} {content}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _last_line(error: BaseException, source: Path) -> str:
    """The last line of the traceback, with the last place in the user's own code."""
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {said}"
    places = [
        f"{frame.filename}:{frame.lineno}: "
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(source)
    ]
    return (places[-1] if places else "") + said


def main(arguments: Sequence[str]) -> int:
    run_dir, *pairs = arguments
    split = [pair.partition("=") for pair in pairs]
    try:
        check([Named(setting=setting, name=name, role="") for setting, _, name in split], Path(run_dir))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CANNOT_LOAD
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
