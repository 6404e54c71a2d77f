"""Keeps secrets out of a configuration, because it is written down, shown and shared. A text is refused if it

- contains the value of an environment variable that has the name of a secret;
- gives a value to such a name, as in `export HF_TOKEN=…` or `--api-key=…`. A value that comes from elsewhere is fine, as in
  `export HF_TOKEN=$(cat ~/.hf_token)`;
- is an address with a password, as in `http://user:password@proxy`.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from conf.schema import ConfigError

SECRET_WORD = r"(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)"
SECRET_NAME = re.compile(rf"(^|_){SECRET_WORD}($|_)")
NAMES_A_FILE = re.compile(r"_(FILE|PATH|DIR)$")
SHORTEST_SECRET = 8  # a shorter one would match many harmless texts
ASSIGNMENT = re.compile(r"(?<![\w-])(?:--)?(?P<name>[A-Za-z_][\w-]*)=(?P<value>\"[^\"]*\"|'[^']*'|\$\([^)]*\)|[^\s;&|,]*)")
OPTION = re.compile(r"^--(?P<name>[A-Za-z][\w-]*)$")
FROM_ELSEWHERE = re.compile(r"\$\w+|\$\{\w+\}|\$\((?:cat|<)[^)]*\)")
PASSWORD_IN_ADDRESS = re.compile(r"\w://[^/\s:@]+:(?![$@])[^/\s@]+@")
REMEDY = (
    "a run's configuration is written down and shared. Export it where you submit: sbatch passes its environment on. Or name "
    'a file that only you can read, as in cluster.setup=[". ~/secrets.sh"]'
)


def refuse_secrets(values: object, environment: Mapping[str, str]) -> None:
    """Raises ConfigError, which names a secret and never shows it. `values` is a configuration as plain containers."""
    secrets = {n: v for n, v in environment.items() if _is_secret(n) and len(v) >= SHORTEST_SECRET}
    for key, texts in _texts(values, ""):
        for text in texts:
            if name := next((name for name, secret in secrets.items() if secret in text), None):
                raise ConfigError(
                    f"{key} holds the value of ${name}: leave it out, because secrets are read from the environment"
                )
            if PASSWORD_IN_ADDRESS.search(text):
                raise ConfigError(f"{key} holds an address with a password in it: {REMEDY}")
        if name := next(_given(texts), None):
            raise ConfigError(f"{key} holds a value for {name}: {REMEDY}")


def _given(texts: list[str]) -> Iterator[str]:
    """The names of secrets to which the texts of one setting give a value. `--name` takes the next text as its value."""
    for text, following in pairwise([*texts, ""]):
        for found in ASSIGNMENT.finditer(text):
            value = found["value"].strip("\"'")
            if _is_secret(found["name"]) and value and not FROM_ELSEWHERE.fullmatch(value):
                yield found["name"]
        if (option := OPTION.match(text)) and _is_secret(option["name"]) and following and not following.startswith("-"):
            yield text


def _is_secret(name: str) -> bool:
    plain = name.upper().replace("-", "_")
    return bool(SECRET_NAME.search(plain)) and not NAMES_A_FILE.search(plain)


def _texts(node: object, key: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        yield key, [item for item in node if isinstance(item, str)]
    elif isinstance(node, str):
        yield key, [node]
