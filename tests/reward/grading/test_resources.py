"""What a judge lends: sandboxes, and places that a waiting slot leaves to others."""

import threading
import time

import pytest

from reward.grading.resources import Sandboxes, Slots
from reward.jail.limits import Cancelled


def test_a_slot_that_waits_leaves_its_place_to_another_up_to_a_bound() -> None:
    slots = Slots(2, most_waiting=1)
    assert slots.take(0.0) == 2 and slots.take(0.0) == 0
    with slots.waiting():
        assert slots.take(0.0) == 1
        with slots.waiting():
            assert slots.take(0.0) == 0
    slots.give_back()
    assert slots.take(0.0) == 0, "three completions are held, and one of two places came back"
    slots.give_back(2)
    assert slots.take(0.0) == 2


def test_a_sandbox_is_lent_to_one_at_a_time_and_kept_warm() -> None:
    sandboxes = Sandboxes(1)
    try:
        with sandboxes.lend(lambda: False) as first:
            cancelled = threading.Event()
            threading.Timer(0.3, cancelled.set).start()
            with pytest.raises(Cancelled), sandboxes.lend(cancelled.is_set):
                pass
        began_s = time.monotonic()
        with sandboxes.lend(lambda: False) as second:
            assert second is first and second.zygotes_started == 1
        assert time.monotonic() - began_s < 5
    finally:
        sandboxes.close()
