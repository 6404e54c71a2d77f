"""What rank 0 learns reaches every rank, and so does its failure; of several failures the first is told."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

from conf.compose.run_folder import TRAINER_FAILURE
from tests.trainer import ranks


def fail_on_rank_0(timeout_s: float) -> tuple[list[str], str, float]:
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.ranks import Control

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=timeout_s)
    control = Control(timeout_s=timeout_s)
    texts = control.gather("x" * mesh.rank)
    shared = control.share(str, lambda: "told")
    start = time.monotonic()

    def make() -> str:
        raise KeyError("the queue is gone")

    try:
        control.share(str, make)
    except (KeyError, RuntimeError) as error:
        return [*texts, shared], type(error).__name__, time.monotonic() - start
    raise AssertionError("share returned")


def test_failure_of_rank_0_is_everybodys_at_once() -> None:
    for rank, (heard, error, seconds) in enumerate(ranks.run(fail_on_rank_0, 3, 30.0)):
        assert heard == ["", "x", "xx", "told"]
        assert error == ("LeaderFailed" if rank else "KeyError")
        assert seconds < 10


def fail_together(run_dir: str, failing_rank: int, error: Exception) -> str:
    """One rank fails with `error`; the others fail because it is gone."""
    import torch.distributed as dist

    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.ranks import FirstFailure

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=30)
    with suppress(RuntimeError, ValueError), FirstFailure(Path(run_dir), expected=(ValueError,)):
        dist.barrier()
        if mesh.rank == failing_rank:
            raise error
        dist.barrier()
    process_groups.shutdown()
    return (Path(run_dir) / TRAINER_FAILURE).read_text()


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_of_several_failures_the_first_is_told(tmp_path: Path, failing_rank: int) -> None:
    (tmp_path / "trainer_failure.txt").write_text("a failure of an earlier start")
    for text in ranks.run(fail_together, 3, str(tmp_path), failing_rank, ValueError("model.path is gone: bring it back")):
        assert text.startswith(f"rank {failing_rank} on ") and text.endswith(": model.path is gone: bring it back\n")


def test_an_unexpected_failure_is_told_with_its_traceback(tmp_path: Path) -> None:
    for text in ranks.run(fail_together, 2, str(tmp_path), 1, RuntimeError("surprise")):
        assert "Traceback" in text and text.endswith("RuntimeError: surprise\n")


def lose_a_rank(run_dir: str) -> None:
    """Rank 1 leaves without a word."""
    import torch.distributed as dist

    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.ranks import FirstFailure

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=30)
    dist.barrier()
    with suppress(RuntimeError), FirstFailure(Path(run_dir), expected=()):
        if mesh.rank == 0:
            dist.barrier()
    process_groups.shutdown()


def test_a_failure_for_want_of_another_rank_says_so(tmp_path: Path) -> None:
    ranks.run(lose_a_rank, 2, str(tmp_path))
    assert "that rank was killed, hangs, or lost its node" in (tmp_path / "trainer_failure.txt").read_text()
