"""A small run like the job of 256 GPUs, and a simulated one written down as a real one's metrics."""

from conf.schema import RunConfig
from launch.simulate.__main__ import _config as composed
from launch.simulate.scenario import Scenario
from launch.simulate.simulated_trainer import SimulatedStep

SMALL = (
    "experiment=kestrel_256", "algo.groups_per_step=16", "rollout.engines=4", "rollout.concurrency=8", "trainer.steps=10",
    "rollout.window=0", "rollout.max_staleness=2", "trainer.dp=1", "trainer.pp=2", "cluster.nodes=4",
    "trainer.checkpoint_every=4", "plan.sandbox_cores=32", "trainer.recompute=full",
)  # fmt: skip


def small_job(*overrides: str) -> RunConfig:
    return composed([*SMALL, *overrides])


def as_metrics(step: SimulatedStep, scenario: Scenario) -> dict[str, float]:
    engines = scenario.engine_groups[0].engines
    lengths = scenario.workload.stream()
    groups = range((step.step - 1) * scenario.rules.groups_per_step, step.step * scenario.rules.groups_per_step)
    return {
        "step": step.step, "time": step.end_s,
        "time/step_s": step.step_s, "time/wait_batch_s": step.wait_s, "time/old_logprob_s": step.old_logprob_s,
        "time/ref_logprob_s": step.ref_logprob_s, "time/train_s": step.train_s, "time/push_s": step.push_s,
        "tokens/trained": step.trained_tokens, "tokens/generated_per_s": step.generated_tokens / step.step_s,
        "idle/rollout_fraction": step.engine_idle_s / engines / step.step_s,
        "completion/max_tokens": max(max(lengths[g].completion_tokens) for g in groups),
        "queue/to_grade": scenario.workload.grading_mean_s * 128 / step.step_s,
    }  # fmt: skip
