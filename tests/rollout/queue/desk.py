"""A queue server without a socket, for tests: the test is every client, and the clock."""

from pathlib import Path

from rollout.ledger.journal import Journal
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Answered, EngineInfo, Position
from rollout.ledger.wire import pack, unpack
from rollout.prompts.stream import PromptStream
from rollout.queue import messages as m
from rollout.queue.server import QueueServer
from tests.rollout.builders import at_end, prompt, rules, segment, verdict

LEASE_S, STALL_S = 10.0, 60.0
ENGINE = EngineInfo(name="e0", url="http://e0", tp=1, epoch=1)


class Desk:
    """A server without a socket: the test is every client, and the clock."""

    def __init__(self, path: Path, **changed) -> None:
        self.path, self.rules, self.now, self.ids = path, rules(**changed), 1000.0, 0
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.path, self.rules)
        self.ledger = Ledger.replay(self.rules, self.journal.read())
        self.server = QueueServer(
            ledger=self.ledger,
            journal=self.journal,
            stream=PromptStream([[prompt(i) for i in range(50)]], seed=0),
            evals={"heldout": [prompt(100), prompt(101)]},
            lease_s=LEASE_S,
            stall_s=STALL_S,
            now=self.now,
        )

    def restart(self) -> None:
        self.journal.close()
        self.open()

    def send(self, request, client: str = "c", request_id: int | None = None) -> int:
        self.ids += 1
        request_id = self.ids if request_id is None else request_id
        envelope = {"client": client, "id": request_id, "op": type(request).__name__, "fields": request}
        self.server.receive(client.encode(), pack(envelope), self.now)
        return request_id

    def answers(self, after_s: float = 0.0) -> dict[int, m.Answer]:
        """Turns of half a second, as a server without messages makes them."""
        found: dict[int, m.Answer] = {}
        end = self.now + after_s
        while True:
            for _, data in self.server.settle(self.now):
                answer = unpack(m.Answer, data)
                found[answer.id] = answer
            if self.now >= end:
                return found
            self.now = min(self.now + 0.5, end)

    def ask(self, request, client: str = "c"):
        request_id = self.send(request, client)
        answer = self.answers()[request_id]
        assert not answer.error, answer
        return answer.value

    def refusal(self, request) -> tuple[str, str]:
        request_id = self.send(request)
        answer = self.answers()[request_id]
        return answer.error, answer.value

    def register(self, name: str = "e0", epoch: int = 1) -> None:
        self.ask(m.RegisterEngine(name=name, url=f"http://{name}", tp=1, epoch=epoch))

    def publish(self, *engines: str) -> None:
        self.ask(m.Published(version=self.ledger.version, engines=engines or ("e0@1",)))

    def beat(self, holder: str = "e0", held=(), engine: EngineInfo | None = None) -> dict:
        return self.ask(m.Heartbeat(holder=holder, role="worker", held=tuple(held), engine=engine))

    def lease(self, count: int = 1, holder: str = "e0", wait_s: float = 0.0) -> list[Position]:
        work = self.ask(m.LeaseSegments(holder=holder, count=count, wait_s=wait_s))["work"]
        return [Position(*w["position"]) for w in work]

    def report(self, position: Position, versions: list[int], finish: str = "stop", holder: str = "e0") -> str:
        request = m.ReportSegment(holder=holder, position=position, segment=segment(versions, finish))
        return self.ask(request)["outcome"]

    def grade(self, position: Position, reward: float) -> str:
        answered = Answered(at_end(self.ledger, position), verdict(reward))
        return self.ask(m.ReportAnswers(holder="j", answers=[answered]))["outcomes"][0]

    def fill(self, groups: int) -> None:
        for position in self.lease(groups * 2):
            self.report(position, [self.ledger.version])
            self.grade(position, float(position.trajectory))
