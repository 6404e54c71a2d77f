"""Queue servers without a socket, by what has happened to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.queue.desk import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "ledger.db")
    yield desk
    desk.journal.close()


@pytest.fixture
def ready(desk: Desk) -> Desk:
    """With one engine that holds version 0."""
    desk.register()
    desk.publish()
    return desk
