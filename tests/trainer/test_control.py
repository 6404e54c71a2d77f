"""What rank 0 learns reaches every rank, and so does its failure."""

import time

from tests.trainer import ranks


def fail_on_rank_0(timeout_s: float) -> tuple[list[str], str, float]:
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.control import Control

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


def test_ranks_agree_only_when_all_do() -> None:
    assert ranks.run(agreements, 2, 30.0) == [(False, True)] * 2


def agreements(timeout_s: float) -> tuple[bool, bool]:
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.control import Control

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=timeout_s)
    control = Control(timeout_s=timeout_s)
    return control.agree(mesh.rank == 0), control.agree(True)
