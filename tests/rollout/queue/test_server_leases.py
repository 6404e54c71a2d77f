"""Who is leased what by the queue server, and what becomes of the leases of those who fall silent, restart or come back."""

from rollout.ledger.records import Position
from rollout.ledger.wire import pack, unpack
from rollout.queue import messages as m
from tests.rollout.builders import segment
from tests.rollout.queue.desk import ENGINE, LEASE_S


def test_lease_holds_prompt_and_completion_so_far(ready):
    first = ready.lease()[0]
    ready.report(first, [0, 0], "cut")
    work = ready.ask(m.LeaseSegments(holder="e0", count=1, wait_s=0.0))["work"][0]
    first_prompt = ready.ledger.prompt(0).tokens.tolist()
    assert [work["prompt"].tolist(), *map(list, work["completion"])] == [first_prompt, [0, 1]]
    assert (Position(*work["position"]).offset, work["max_new_tokens"]) == (2, 4)


def test_judge_gets_tokens_prefill_and_task(ready):
    ready.report(ready.lease()[0], [0, 0])
    work = ready.ask(m.LeaseGrading(holder="j", count=5, wait_s=0.0))["work"]
    assert [([list(tokens) for turn in w["turns"] for tokens in turn], w["finish"], w["task"]["kind"]) for w in work] == [
        ([[0, 1]], "stop", "calls")
    ]


def test_leases_of_a_holder_that_falls_silent_return(ready):
    ready.register("e1")
    ready.publish("e0@1", "e1@1")
    held = ready.lease(2)
    for _ in range(3):
        ready.answers(after_s=LEASE_S / 2)
        ready.beat("e1")
    assert ready.ledger.leases.held("e0") == []
    assert ready.lease(2, "e1") == held
    assert ready.ask(m.Status())["status"]["leases_taken_back"] == {"silent": 2}


def test_server_that_was_stopped_itself_takes_no_leases_back(ready):
    held = ready.lease(2)
    ready.now += 10 * LEASE_S  # one turn
    ready.answers()
    assert sorted(ready.ledger.leases.held("e0"), key=repr) == sorted(held, key=repr)


def test_worker_that_comes_back_late_learns_which_of_its_leases_are_not_its_own_any_more(ready):
    ready.register("e1")
    ready.publish("e0@1", "e1@1")
    held = ready.lease(2)
    ready.answers(after_s=LEASE_S - 1)
    ready.beat("e1")
    ready.answers(after_s=2.0)
    assert ready.lease(1, "e1") == held[:1]
    heard = ready.beat("e0", held, ENGINE)
    assert [Position(*p) for p in heard["cancel"]] == held[:1]


def test_lease_that_never_reached_its_holder_is_free_after_two_heartbeats(ready):
    lost = ready.lease(1)
    ready.beat("e0", [])
    assert ready.ledger.leases.held("e0") == lost
    ready.beat("e0", [])
    assert ready.ledger.leases.held("e0") == []


def test_restarted_server_takes_up_the_leases_that_heartbeats_list(ready):
    held = ready.lease(3)
    ready.restart()
    heard = ready.beat("e0", held, ENGINE)
    assert heard["cancel"] == []
    assert ready.report(held[0], [0]) == "recorded"
    assert held[1] not in ready.lease(9)


def test_long_poll_is_served_when_work_appears_and_ends_empty_when_it_does_not(ready):
    waiting = ready.send(m.LeaseGrading(holder="j", count=1, wait_s=5.0))
    assert waiting not in ready.answers(after_s=2.0)
    position = ready.lease()[0]
    report = ready.send(m.ReportSegment(holder="e0", position=position, segment=segment([0])))
    assert set(ready.answers()) == {waiting, report}
    empty = ready.send(m.LeaseGrading(holder="j", count=1, wait_s=5.0))
    assert ready.answers(after_s=5.0)[empty].value == {"work": []}


def test_request_sent_again_over_another_connection_is_answered_there_once(ready):
    request = m.LeaseGrading(holder="j", count=1, wait_s=5.0)
    request_id = ready.send(request)
    envelope = {"client": "c", "id": request_id, "op": "LeaseGrading", "fields": request}
    ready.server.receive(b"other route", pack(envelope), ready.now)
    ready.report(ready.lease()[0], [0])
    served = [route for route, data in ready.server.settle(ready.now) if unpack(m.Answer, data).id == request_id]
    leased = ready.ledger.leases.held("j")
    assert len(leased) == 1 and served in ([], [b"other route"])


# Engines.


def test_engine_without_the_published_version_gets_no_lease(desk):
    desk.register()
    assert desk.lease() == []
    desk.publish()
    assert desk.lease() != []


def test_restarted_engine_is_another_engine(ready):
    held = ready.lease()
    ready.register(epoch=2)
    assert ready.lease() == [] and ready.ledger.leases.held("e0") == []
    assert ready.ask(m.Fleet())["engines"][0]["version"] is None
    ready.publish("e0@2")
    assert ready.lease() == held


def test_push_that_ends_after_the_engine_has_restarted_does_not_count_for_it(desk):
    desk.register(epoch=1)
    desk.register(epoch=2)
    desk.publish("e0@1")
    assert desk.lease() == []


def test_condemned_engine_leaves_the_fleet_until_it_comes_back_with_another_epoch(ready):
    ready.lease()
    ready.ask(m.Condemn(engine="e0@1", reason="push failed"))
    assert ready.ask(m.Fleet())["engines"] == [] and ready.lease() == []
    assert ready.beat("e0", (), ENGINE)["condemned"] == "push failed"
    ready.register(epoch=2)
    assert [e["epoch"] for e in ready.ask(m.Fleet())["engines"]] == [2]
    assert ready.beat("e0")["condemned"] == ""


def test_engine_whose_worker_falls_silent_leaves_the_fleet(ready):
    ready.answers(after_s=LEASE_S + 1)
    assert ready.ask(m.Fleet())["engines"] == []
    ready.beat("e0", (), ENGINE)
    assert [e["version"] for e in ready.ask(m.Fleet())["engines"]] == [0]
