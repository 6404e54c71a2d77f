"""What dies while the collectives of a push run: a rank of the trainer, or the queue server. The run ends as one without."""

import threading
from pathlib import Path

import pytest
import torch

from tests.rollout.stage import free_ports
from tests.trainer import ranks
from tests.trainer.stand_in_run import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CHANGES = {"data__heldout": [], "trainer__steps": 4, "trainer__push_bucket_bytes": 5_000}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = make_run(tmp_path_factory.mktemp("plain"), free_ports(40), **CHANGES)
    with run.queue():
        run.train()
    return run.weights()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_dies_in_a_push_goes_on_from_its_checkpoint(
    tmp_path: Path, weights: dict[str, torch.Tensor], rank: int
) -> None:
    run = make_run(tmp_path, free_ports(40), **CHANGES)
    run.dies_in_push = run.path / f"rank-{rank}.pid"
    with run.queue(), pytest.raises(ranks.RankFailed, match=ranks.ONE_WAS_KILLED):
        run.train()
    assert not run.dies_in_push.exists()
    run.dies_in_push = None
    with run.queue():
        run.train()
    after = run.weights()
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_a_queue_server_that_dies_in_a_push_is_waited_for(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    run = make_run(tmp_path, free_ports(40), **CHANGES)
    run.dies_in_push = run.path / "queue.pid"
    over = threading.Event()

    def start_again() -> None:
        first.wait()
        with run.queue():
            over.wait()

    with run.queue() as first:
        launcher = threading.Thread(target=start_again)
        launcher.start()
        try:
            run.train()
        finally:
            over.set()
            first.kill()
            launcher.join()
    assert first.returncode == -9
    after = run.weights()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
