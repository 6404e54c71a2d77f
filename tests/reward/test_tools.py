"""Tools of a user's own as JSON schemas. That they are called is tested with the examples of docs/episodes.md."""

from pathlib import Path

import pytest

from conf.schema import ConfigError
from reward.tools import Tools, schemas

PAGE = Path(__file__).parents[2] / "docs/episodes.md"


def test_schema_of_a_tool_is_made_of_its_type_hints_and_its_docstring() -> None:
    code = next(part for part in PAGE.read_text().split("```python\n")[1:] if "class Shop" in part)
    names: dict[str, type[Tools]] = {}
    exec(code.split("```")[0], names)
    (price,) = schemas(names["Shop"])
    assert price["function"]["name"] == "price" and price["function"]["description"] == "Says what one item costs."
    parameters = price["function"]["parameters"]
    assert parameters["required"] == ["item"] and parameters["properties"]["item"]["type"] == "string"


@pytest.mark.parametrize("missing", ["hints", "docstring", "method"])
def test_tool_that_cannot_be_described_says_what_is_missing(missing: str) -> None:
    class Search(Tools):
        tools = (missing,)

        def hints(self, words):  # type: ignore[no-untyped-def]
            """Searches.

            Args:
                words: what for
            """

        def docstring(self, words: str) -> str:
            return words

    with pytest.raises(ConfigError, match=f"a tool needs .*{missing}"):
        schemas(Search)
