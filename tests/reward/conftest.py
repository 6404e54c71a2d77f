"""One warm sandbox for all tests of the grader."""

from collections.abc import Iterator

import pytest

from reward.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as warm:
        yield warm
