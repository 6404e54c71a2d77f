"""What the queue server answers to the trainer, and when its answers leave."""

import pytest

from rollout.ledger.journal import JournalError
from rollout.ledger.records import Answered
from rollout.ledger.wire import pack
from rollout.queue import messages as m
from tests.rollout.builders import at_end, rules, segment, verdict
from tests.rollout.queue.desk import ENGINE, STALL_S, Desk


def test_take_waits_and_then_tells_what_is_waited_for(ready):
    ready.lease(1)
    request_id = ready.send(m.Take(step=0, wait_s=3.0))
    assert request_id not in ready.answers(after_s=2.0)
    waiting = ready.answers(after_s=1.0)[request_id].value["waiting"]
    assert "no judge is running" in waiting["table"] and not waiting["fleet_changed"]
    rows = [line.split("   ") for line in waiting["table"].splitlines()]
    said = {cells[0]: [cell.strip() for cell in cells[1:] if cell] for cells in rows}
    assert said["trainer"] == ["step 0", "3 s"]
    assert said["group 0"] == ["1 to_generate, 1 generating (leased to e0)", "since version 0"]
    assert said["engine e0"] == ["nothing: it holds version 0 (http://e0)"]
    assert said["worker e0"] == ["1 leases of its own", "heard 3.0 s ago"]


def test_take_returns_at_once_when_an_engine_has_joined_that_the_trainer_has_not_seen(ready):
    ready.ask(m.Fleet())
    request_id = ready.send(m.Take(step=0, wait_s=30.0))
    assert request_id not in ready.answers(after_s=1.0)
    ready.send(m.RegisterEngine(name="e1", url="http://e1", tp=1, epoch=1))
    assert ready.answers()[request_id].value["waiting"]["fleet_changed"]
    ready.ask(m.Fleet())  # seen; a push to it may fail, and then it is not announced again and again
    request_id = ready.send(m.Take(step=0, wait_s=5.0))
    assert request_id not in ready.answers(after_s=4.0)
    assert ready.answers(after_s=1.0)[request_id].value["waiting"]["fleet_changed"]


def test_batch_is_served_again_after_a_restart_of_the_server(ready):
    ready.fill(groups=2)
    first = ready.ask(m.Take(step=0, wait_s=0.0))["groups"]
    ready.restart()
    again = ready.ask(m.Take(step=0, wait_s=0.0))["groups"]
    assert pack(first) == pack(again)


def test_answers_leave_only_after_the_commit(ready, monkeypatch):
    ready.send(m.ReportSegment(holder="e0", position=ready.lease()[0], segment=segment([0])))

    def full() -> int:
        raise JournalError("disk is full")

    monkeypatch.setattr(ready.journal, "commit", full)
    with pytest.raises(JournalError):
        ready.answers()
    ready.restart()
    assert ready.ledger.summary()["waiting_tokens"] == 0  # unacknowledged, so its worker reports it again


def test_wait_in_which_nothing_moves_ends_with_the_table(ready):
    ready.lease(1)
    request_id = ready.send(m.Take(step=0, wait_s=60.0))
    assert not ready.answers(after_s=STALL_S)[request_id].error
    ready.answers(after_s=1.0)
    error, text = ready.refusal(m.Take(step=0, wait_s=60.0))
    assert error == "stalled" and "nothing has moved for 61 s" in text and "no worker is running" in text


def test_wait_goes_on_as_long_as_anything_moves(ready):
    ready.ask(m.Take(step=0, wait_s=0.0))
    for _ in range(5):
        ready.answers(after_s=STALL_S / 2)
        ready.beat("e0", (), ENGINE)
        ready.report(ready.lease(1)[0], [0])
        assert not ready.answers()
        assert ready.ask(m.Take(step=0, wait_s=0.0))["waiting"]


def test_evaluation_is_leased_first_and_its_result_is_told_once(ready):
    ready.ask(m.StartEval(eval_id="e", split="heldout", completions=1))
    ready.ask(m.StartEval(eval_id="e", split="heldout", completions=1))
    asked = ready.send(m.AskEval(eval_id="e", wait_s=20.0))
    for position in ready.lease(2):
        assert position.group < 0
        ready.report(position, [0])
        ready.send(m.ReportAnswers(holder="j", answers=[Answered(at_end(ready.ledger, position), verdict(1.0))]))
    result = ready.answers()[asked].value["result"]
    assert [p["prompt_id"] for p in result["prompts"]] == ["p100", "p101"]
    assert ready.refusal(m.StartEval(eval_id="x", split="nowhere", completions=1))[0] == "refused"


def test_run_that_is_over_leases_nothing_and_says_so(ready):
    ready.ask(m.Stop())
    assert ready.lease() == []
    assert ready.beat()["closing"]


def test_run_that_is_over_stays_over_when_the_server_restarts_and_begins_again_with_a_trainer(ready):
    ready.ask(m.Stop())
    ready.restart()
    assert ready.beat()["closing"]
    ready.ask(m.Rewind(version=0))
    assert not ready.beat()["closing"]
    ready.ask(m.Stop())
    ready.ask(m.Durable(version=0))
    ready.restart()
    assert ready.beat()["closing"]


def test_run_that_was_over_and_has_more_steps_now_keeps_its_workers_until_its_trainer_comes(tmp_path):
    desk = Desk(tmp_path / "ledger.db", total_steps=1)
    desk.register()
    desk.publish()
    desk.fill(groups=2)
    desk.ask(m.Take(step=0, wait_s=0.0))
    desk.ask(m.Advance(version=1, engines=["e0@1"]))
    desk.ask(m.Stop())
    desk.restart()
    assert desk.beat()["closing"]
    desk.rules = rules(total_steps=2)
    desk.restart()
    assert not desk.beat()["closing"]
    desk.ask(m.Rewind(version=1))
    desk.register(epoch=2)
    desk.publish("e0@2")
    assert desk.lease()


# Late requests.


def test_copy_of_a_request_that_was_overtaken_by_a_later_one_does_nothing(ready):
    rewind = ready.send(m.Rewind(version=0), "trainer")
    ready.answers()
    ready.ask(m.Published(version=0, engines=("e0@1",)), "trainer")
    ready.send(m.Rewind(version=0), "trainer", request_id=rewind)
    assert rewind not in ready.answers()
    assert ready.ledger.state.engines == {"e0@1"}


def test_what_a_killed_trainer_had_sent_is_refused_once_the_next_one_has_begun(ready):
    ready.ask(m.Rewind(version=0), "first")
    ready.ask(m.Published(version=0, engines=("e0@1",)), "first")
    ready.fill(groups=2)
    ready.ask(m.Take(step=0, wait_s=0.0), "first")
    ready.ask(m.Rewind(version=0), "second")
    for late in (m.Advance(version=1, engines=("e0@1",)), m.Rewind(version=0), m.Durable(version=0), m.Stop()):
        request_id = ready.send(late, "first")
        answer = ready.answers()[request_id]
        assert answer.error == "refused" and "second has begun after it" in answer.value
    assert ready.ledger.version == 0
    ready.ask(m.Published(version=0, engines=("e0@1",)), "second")
    assert ready.ask(m.Take(step=0, wait_s=0.0), "second")["groups"]


def test_process_that_is_not_the_current_trainer_may_not_move_the_version(ready):
    ready.ask(m.Rewind(version=0), "trainer")
    request_id = ready.send(m.Published(version=0, engines=()), "somebody")
    assert "has not begun with `rewind`" in ready.answers()[request_id].value
    assert ready.ask(m.Status(), "somebody")


def test_table_tells_who_has_asked_for_work_in_vain_and_which_engines_need_a_push_or_a_start(ready):
    ready.register("e1")
    ready.register("e2")
    ready.ask(m.Condemn(engine="e2@1", reason="push failed"))
    ready.ask(m.Fleet())
    ready.send(m.LeaseGrading(holder="j", count=1, wait_s=9.0))
    request_id = ready.send(m.Take(step=0, wait_s=4.0))
    table = ready.answers(after_s=4.0)[request_id].value["waiting"]["table"]
    rows = {" ".join(line.split()) for line in table.splitlines()}
    assert "judge j completions to grade 4 s, heard 4.0 s ago" in rows
    assert "engine e1 a push of the published version (http://e1)" in rows
    assert "engine e2@1 its restart: push failed" in rows


# Memory.


def in_memory(desk) -> set[int]:
    return {*desk.ledger.state.groups, *desk.ledger.state.loaded}


def test_what_was_trained_on_is_on_disk_only_and_comes_back_when_the_trainer_does(ready):
    ready.fill(groups=2)
    first = ready.ask(m.Take(step=0, wait_s=0.0))["groups"]
    tokens = ready.ask(m.Status())["status"]["ledger"]["waiting_tokens"]
    ready.ask(m.Advance(version=1, engines=("e0@1",)))
    assert not in_memory(ready)
    assert ready.ask(m.Status())["status"]["ledger"]["trained_tokens"] == tokens
    for restart in (False, True):
        if restart:
            ready.restart()
        ready.ask(m.Rewind(version=0))
        assert pack(ready.ask(m.Take(step=0, wait_s=0.0))["groups"]) == pack(first)
        ready.register()
        ready.ask(m.Advance(version=1, engines=("e0@1",)))
        assert not in_memory(ready)


def test_each_verdict_of_a_report_has_an_answer_of_its_own(ready):
    first, second = ready.lease(2)
    ready.report(first, [0])
    ready.report(second, [0])
    of = [Answered(at_end(ready.ledger, p), verdict(1.0)) for p in (first, second)]
    report = m.ReportAnswers(holder="j", answers=[of[0]])
    assert ready.ask(report)["outcomes"] == ["recorded"]
    both = m.ReportAnswers(holder="j", answers=of)
    assert ready.ask(both)["outcomes"] == ["duplicate", "recorded"]
    assert ready.ask(both)["outcomes"] == ["duplicate", "duplicate"]


def test_report_that_is_repeated_after_its_group_was_trained_on_loses_nothing(ready):
    positions = ready.lease(4)
    for position in positions:
        ready.report(position, [0, 0])
        ready.grade(position, float(position.trajectory))
    ready.ask(m.Take(step=0, wait_s=0.0))
    ready.ask(m.Advance(version=1, engines=("e0@1",)))
    assert ready.report(positions[0], [0, 0]) == "recorded"
    assert ready.report(positions[0], [0]) == "duplicate"
    assert ready.ask(m.Status())["status"]["ledger"]["lost_tokens"] == {"duplicate": 1}
