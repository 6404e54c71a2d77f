"""The plan as text, in sections. `SECTIONS` lists them by the names that `plan.show` takes."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict

from conf.schema import ConfigError
from launch.plan.answer import answer
from launch.plan.calibration import DATA, stored, stored_errors
from launch.plan.cost_lines import CostLine, count, gb, several, total
from launch.plan.generation import engine_tps, sequences_that_fit
from launch.plan.inputs import DAY_S
from launch.plan.model_costs import WEIGHT_BYTES, kv_bytes_per_token, weight_bytes
from launch.plan.reliability import ONE_BUCKET, gathered_bytes, host_bytes
from launch.plan.search import Plan, Search
from launch.plan.study import STATED, Study, longest_by_concurrency
from launch.plan.table import table
from launch.plan.training import OPTIMIZER_BYTES, PCIE_BYTES_S, STATE_BYTES, USABLE, stage_parameters
from launch.plan.training_points import published

FIELD = DATA / "field.csv"
FITTED = {
    "decode_step_s": "time of every decode step, whatever it holds",
    "sequence_s": "time added per running sequence",
    "weight_fraction": "fraction of HBM bandwidth while weights are read",
    "kv_fraction": "fraction of HBM bandwidth while the KV cache is read",
    "prefill_fraction": "fraction of peak FLOP/s in prefill",
    "exchange_fraction": "fraction of one NVLink direction between TP ranks",
    "engine_memory_fraction": "fraction of GPU memory for weights and KV cache",
    "prefill_share": "fraction of prefill that adds to the time per token",
    "chunk_loss": "prefill chunks that delay no decoding",
    "output_exponent": "exponent by which that fraction grows with the output",
    "retraction": "slowdown when the KV cache is oversubscribed",
    "train_fraction": "fraction of peak FLOP/s while a pipeline stage computes",
}
UNITS = {"decode_step_s": "{:.5f} s", "sequence_s": "{:.7f} s"}
DECODE_SEQUENCES = (32, 64, 128, 256, 512)
LATENCY_SEQUENCES = (16, 32, 64, 128, 192)


def inputs(study: Study) -> str:
    model, cluster, work, lengths = study.model, study.cluster, study.workload, study.workload.lengths
    naive = work.prompt_tokens + lengths.mean_tokens / 2
    rows = [
        ("model", f"{model.name}: {count(model.parameters)} parameters, {gb(weight_bytes(model))} in bf16; "
                  f"{model.layers} layers"),
        ("KV cache", f"2 x {model.kv_heads} heads x {model.head_dim} x {model.layers} layers x 2 bytes = "
                     f"{kv_bytes_per_token(model) / 1024:.0f} KiB per token"),
        ("cluster", f"{several(cluster.nodes, 'node')} x {cluster.gpus_per_node} GPUs = {cluster.gpus}: "
                    f"{cluster.gpu_bytes / 1e9:.0f} GB, {cluster.hbm_bytes_s / 1e12:.2f} TB/s, "
                    f"{cluster.flops / 1e12:.0f} TFLOP/s each"
                    + (f"; {cluster.frozen_gpus} for a teacher or judge model" if cluster.frozen_gpus else "")),
        ("network", f"{cluster.network_bytes_s / 1e9:.0f} GB/s per GPU, NVLink {cluster.nvlink_bytes_s / 1e9:.0f} GB/s, storage "
                    f"{cluster.storage_bytes_s / 1e9:.0f} GB/s in total"),
        ("one step", f"{work.groups} prompts x {work.completions_per_group} = {work.completions} completions, "
                     f"{work.minibatches} minibatches"),
        ("tokens per step", f"{count(work.generated_tokens)} generated, {count(work.prompt_tokens_per_step)} of prompts, "
                          f"{count(work.trained_tokens)} trained on"),
        ("completions", f"mean {lengths.mean_tokens:.0f} tokens, median {lengths.median_tokens:.0f}, "
                        f"{lengths.capped_fraction:.2%} reach {lengths.cap_tokens}: "
                        f"{work.completions * lengths.capped_fraction:.0f} per step"),
        ("context", f"{work.context_tokens:.0f} tokens per running sequence: long ones run longer, so more than "
                    f"{work.prompt_tokens:.0f} + {lengths.mean_tokens:.0f}/2 = {naive:.0f}"),
        ("target", f"{work.steps} steps in {work.target_hours:.0f} h: {work.target_hours * 3600 / work.steps:.0f} s per step"),
    ]  # fmt: skip
    return "\n".join(f"{name:<14} {text}" for name, text in rows)


def estimate(study: Study) -> str:
    """A short estimate with the stated fractions alone."""
    speed, work, model = study.searches[STATED].speed, study.workload, study.model
    rate = speed.cluster.flops * speed.constants.train_fraction
    forward = 2 * model.parameters * work.trained_tokens
    n, trained = count(model.parameters), count(work.trained_tokens)
    passes = 4 + work.reference
    naive = work.prompt_tokens + work.lengths.mean_tokens / 2
    step_s = speed.decode_step_s(4, 64, naive)
    tokens_s = 64 / step_s / 4
    decode_s = work.generated_tokens / tokens_s
    prefill_s = 2 * model.parameters * work.prompt_tokens_per_step / (speed.cluster.flops * speed.constants.prefill_fraction)
    train_s = passes * forward / rate
    state = STATE_BYTES * model.parameters
    rows = [
        ("training", f"6 x {n} x {trained} = {3 * forward:.3g} FLOP", 3 * forward / rate),
        ("log-probs", f"{passes - 3} x 2 x {n} x {trained} = {(passes - 3) * forward:.3g} FLOP", (passes - 3) * forward / rate),
        ("trainer", f"at {rate / 1e12:.1f} TFLOP/s", train_s),
        ("prefill", f"2 x {n} x {count(work.prompt_tokens_per_step)} FLOP", prefill_s),
        ("decode", f"TP4, 64 sequences of {naive:.0f} tokens: {step_s * 1e3:.2f} ms per step, {tokens_s:.0f} tokens/s per GPU",
         decode_s),
        ("fleet", "prefill and decode", prefill_s + decode_s),
        ("both", f"{train_s / (train_s + prefill_s + decode_s):.0%} of it training; over {study.cluster.gpus} GPUs "
                 f"{(train_s + prefill_s + decode_s) / study.cluster.gpus:.0f} s per step", train_s + prefill_s + decode_s),
    ]  # fmt: skip
    text = table(("stated", "arithmetic", "GPU-seconds"), [(n, w, f"{s:,.0f}") for n, w, s in rows], left=2)
    sandbox = work.completions * work.sandbox_s
    return (
        f"{text}\n\nstate     ({WEIGHT_BYTES} + {OPTIMIZER_BYTES}) x {count(model.parameters)} = {gb(state)}, "
        f"{state / speed.cluster.storage_bytes_s:.1f} s to the storage\n"
        f"sandboxes {work.completions} x {work.sandbox_s:.0f} s = {sandbox:,.0f} core-seconds, over {work.sandbox_cores} cores "
        f"{sandbox / work.sandbox_cores:.0f} s\n"
        f"failures  {study.cluster.nodes} nodes x {work.target_hours:.0f} h / {study.cluster.node_mtbf_s / DAY_S:.0f} days = "
        f"{study.cluster.nodes * work.target_hours * 3600 / study.cluster.node_mtbf_s:.1f} in {work.target_hours:.0f} h"
    )


def _lines(study: Study, lines: Callable[[Plan], Sequence[CostLine]], gpus: Callable[[Plan], int]) -> str:
    parts = []
    for name, plan in study.best.items():
        all_lines = lines(plan)
        rows = [(line.name, f"{line.gpu_s:,.0f}", f"{line.gpu_s / gpus(plan):.1f}", line.why) for line in all_lines]
        rows.append(("total", f"{total(all_lines):,.0f}", f"{total(all_lines) / gpus(plan):.1f}", f"on {gpus(plan)} GPUs"))
        parts.append(table((f"{name}", "GPU-s", "s", "why"), rows))
    return "\n\n".join(parts)


def training(study: Study) -> str:
    return _lines(study, lambda p: p.training.lines, lambda p: p.training.setup.gpus)


def generation(study: Study) -> str:
    return _lines(study, lambda p: p.generation.lines, lambda p: p.generation.fleet.gpus)


def _cache_bytes(study: Study, plan: Plan) -> float:
    """The KV cache of one GPU of an engine."""
    tp = plan.generation.fleet.tp
    return plan.generation.kv_tokens * kv_bytes_per_token(study.model, tp) / tp


def memory(study: Study) -> str:
    plans = study.best
    rows = []
    for part in ("weights", "gradients", "optimizer", "activations", "logits"):
        rows.append((f"trainer: {part}", *(gb(getattr(p.training.memory, part)) for p in plans.values())))
    rows.append(("trainer: total", *(gb(p.training.memory.bytes) for p in plans.values())))
    rows.append((f"usable, {USABLE:.0%}", *(gb(USABLE * study.cluster.gpu_bytes) for _ in plans)))
    for name, value in (
        ("engine: weights", lambda p: gb(weight_bytes(study.model) / p.generation.fleet.tp)),
        ("engine: KV cache", lambda p: gb(_cache_bytes(study, p))),
        ("engine: tokens", lambda p: f"{p.generation.kv_tokens:,.0f}"),
        ("engine: sequences", lambda p: str(sequences_that_fit(study.workload, p.speed, p.generation.fleet.tp))),
        ("of which used", lambda p: f"{p.generation.running:.0f}"),
    ):
        rows.append((name, *(value(p) for p in plans.values())))
    return table(("per GPU", *plans), rows)


def decode(study: Study) -> str:
    """Time of one decode step by engine TP and sequences."""
    parts = []
    for name, search in study.searches.items():
        speed, context = search.speed, study.workload.context_tokens
        rows = []
        for tp in engine_tps(speed):
            cells = [
                f"{speed.decode_step_s(tp, n, context) * 1e3:.2f}{' ' if n * context <= speed.kv_tokens(tp) else '*'}"
                for n in DECODE_SEQUENCES
            ]
            rows.append((f"TP{tp}", *cells, f"{max(0.0, speed.kv_tokens(tp)) / 1e3:,.0f}k"))
        parts.append(table((f"{name}: ms per step", *(f"{n} seq" for n in DECODE_SEQUENCES), "KV tokens, 1 engine"), rows))
    return "\n\n".join(parts) + f"\n\nat {study.workload.context_tokens:.0f} tokens of context; * more than the cache holds"


def latency(study: Study) -> str:
    """The time of a completion that reaches the cap, on the best split, by engine TP and concurrency."""
    parts = []
    for name, search in study.searches.items():
        found = longest_by_concurrency(search, LATENCY_SEQUENCES)
        rows = []
        for tp, by in found.items():
            costs = {n: plan.generation for n, plan in by.items()}
            cells = [f"{costs[n].longest_s:.0f} / {costs[n].step_s:.0f}" if n in costs else "-" for n in LATENCY_SEQUENCES]
            rows.append((f"TP{tp}", *cells))
        parts.append(table((f"{name}: longest / fleet's step, s", *(f"{n} seq" for n in LATENCY_SEQUENCES)), rows))
    return "\n\n".join(parts)


def splits(study: Study) -> str:
    parts = []
    for name, search in study.searches.items():
        reach = 4 * search.trainer_gpus.step
        near = [p for p in search.splits if abs(p.training.setup.gpus - search.best.training.setup.gpus) <= reach]
        parts.append(_plans(name, near, search.best))
    return "\n\n".join(parts)


def _plans(name: str, plans: Sequence[Plan], best: Plan) -> str:
    rows = []
    for plan in plans:
        rows.append((
            plan.split, str(plan.training.setup), str(plan.generation.fleet),
            str(plan.max_staleness), f"{plan.training.step_s:.1f}", f"{plan.generation.step_s:.1f}",
            f"{plan.step_s:.1f}", "best" if plan == best else f"{plan.step_s / best.step_s - 1:+.1%}: {plan.limit}",
        ))  # fmt: skip
    return table((name, "trainer", "fleet", "S", "train s", "gen s", "step s", "limited by"), rows, left=3)


def runners_up(study: Study) -> str:
    """What else was looked at, and what makes it slower."""
    parts = []
    for name, search in study.searches.items():
        best = search.best
        rows = []
        for cost in search.trainers(best.training.setup.gpus)[1:5]:
            worse = _what_grew(best.training.lines, cost.lines)
            rows.append((f"trainer {cost.setup}", f"{cost.step_s:.1f}", f"{cost.step_s / best.training.step_s - 1:+.1%}", worse))
        rows += [_other_engines(study, search, tp) for tp in engine_tps(search.speed) if tp != best.generation.fleet.tp]
        parts.append(table((name, "s", "slower", "why"), rows))
    return "\n\n".join(parts)


def _other_engines(study: Study, search: Search, tp: int) -> tuple[str, str, str, str]:
    name = f"engines of TP{tp}"
    if other := search.best_with(engine_tp=tp):
        return name, f"{other.step_s:.1f}", f"{other.step_s / search.best.step_s - 1:+.1%}", f"{other}: {other.limit}"
    room = search.speed.kv_tokens(tp)
    fits = f"{room:,.0f} tokens of cache" if room > 0 else "no room beside the weights"
    return name, "-", "-", f"{fits}; the longest completion is {study.workload.longest_tokens:.0f}"


def _what_grew(best: Sequence[CostLine], other: Sequence[CostLine]) -> str:
    before = {line.name: line.gpu_s for line in best}
    grown = sorted(((line.gpu_s - before.get(line.name, 0.0), line) for line in other), key=lambda pair: -pair[0])
    return ", ".join(f"{line.name} +{more:,.0f} GPU-s" for more, line in grown[:2] if more > 1) or "as fast"


def staleness(study: Study) -> str:
    """The best plan for each max_staleness; 0 is the synchronous algorithm."""
    parts = []
    for name, search in study.searches.items():
        rows = []
        for s in range(study.config.plan.staleness_limit + 1):
            plan = search.best_with(staleness=(s,))
            if plan is not None:
                rows.append((
                    str(s), f"{plan.step_s:.1f}", f"{plan.hours:.1f}", f"{plan.generation.longest_s:.0f}", str(plan.in_flight),
                    plan.split,
                    str(plan.generation.fleet), plan.limit,
                ))  # fmt: skip
        head = (name, "step s", "hours", "longest s", "in flight", study.cluster.unit, "fleet", "limited by")
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def checkpoints(study: Study) -> str:
    work, one_bucket = study.workload, not study.config.trainer.overlap_grad_reduce
    reference = WEIGHT_BYTES if work.reference else 0

    def of_a_node(plan: Plan) -> float:
        """Host memory that the trainer uses on one node."""
        setup = plan.training.setup
        of_a_rank = host_bytes(stage_parameters(study.model, setup), one_bucket=one_bucket, reference_bytes=reference)
        return min(setup.gpus, study.cluster.gpus_per_node) * of_a_rank

    def row(name: str, value: Callable[[Plan], str]) -> tuple[str, ...]:
        return (name, *(value(plan) for plan in study.best.values()))

    rows = [
        row("state", lambda p: gb(p.reliability.state_bytes)),
        row("written to storage in", lambda p: f"{p.reliability.write_s:.1f} s"),
        row("gathered per rank", lambda p: gb(gathered_bytes(p.speed, p.training.setup))),
        row("trainer stalls for", lambda p: f"{p.reliability.stall_s:.1f} s"),
        row("host memory per trainer node", lambda p: gb(of_a_node(p))),
        row("some node fails every", lambda p: f"{p.reliability.job_mtbf_s / 3600:.1f} h"),
        row("some trainer node fails every", lambda p: f"{p.reliability.trainer_mtbf_s / 3600:.1f} h"),
        row("node failures in the run", lambda p: f"{p.reliability.failures:.1f}"),
        row("trainer nodes among them", lambda p: f"{p.reliability.trainer_failures:.1f}"),
        row("best interval, saving blocks", lambda p: f"{p.reliability.young_blocking_s:.0f} s"),
        row("best interval, asynchronous", lambda p: f"{p.reliability.young_s:.0f} s"),
        row("nearly as good up to", lambda p: f"{p.reliability.interval_steps} steps"),
        row("lost per trainer failure", lambda p: f"{p.reliability.lost_s_per_failure:.0f} s"),
        row("whole run", lambda p: f"{p.hours:.1f} h"),
    ]
    bucket = f", times {ONE_BUCKET:.2f} because trainer.overlap_grad_reduce=false makes one bucket" if one_bucket else ""
    waits = f", and {reference} bytes per parameter for the reference's weights" if reference else ""
    return (
        f"{table(('', *study.best), rows)}\n\n"
        f"gathered: {OPTIMIZER_BYTES} bytes per parameter of a rank's share, on every data-parallel rank, over "
        f"{study.cluster.network_bytes_s / 1e9:.0f} GB/s NICs and {PCIE_BYTES_S / 1e9:.0f} GB/s PCIe\n"
        f"host memory: the same bytes until they are written{bucket}{waits}; {study.cluster.gpus_per_node} ranks per node"
    )


def configured(study: Study) -> str:
    if study.misfit:
        return study.misfit
    rows = []
    for name, plan in study.configured.items():
        best = study.best[name]
        slower = f"{plan.step_s / best.step_s - 1:+.0%}" if str(plan) != str(best) else "the best"
        rows.append((
            name, str(plan), f"{plan.training.step_s:.1f}", f"{plan.generation.step_s:.1f}", f"{plan.step_s:.1f}",
            f"{plan.hours:.1f}", f"{slower}: {plan.limit}",
        ))  # fmt: skip
    return table(("as configured", "", "train s", "gen s", "step s", "hours", "limited by"), rows, left=2)


def what_if(study: Study) -> str:
    parts = []
    for name, search in study.searches.items():
        rows = []
        for change in study.what_ifs:
            kept, again = change.unchanged_split(search.best), change.applied(search).best
            rows.append((
                change.what, f"{kept.step_s:.1f}", f"{kept.hours:.1f}", kept.limit, f"{again.step_s:.1f}", f"{again.hours:.1f}",
                again.split,
            ))  # fmt: skip
        parts.append(table((name, "step s", "hours", "limited by", "planned anew", "hours", study.cluster.unit), rows))
    return "\n\n".join(parts)


def calibration(study: Study) -> str:
    """The fitted constants, and how well they predict measurements that were held back."""
    fitted = stored()
    values = {**asdict(fitted.constants), **asdict(fitted.protocol)}
    rows = [(name, UNITS.get(name, "{:.3f}").format(value), said) for name, said in FITTED.items() for value in [values[name]]]
    errors = [(e.what, f"{e.median:.1%}", f"{e.p90:.1%}", f"{e.largest:.1%}") for e in stored_errors()]
    return (
        f"{table(('constant', 'value', 'meaning'), rows)}\n\n"
        f"{table(('time per output token', 'median', '90th percentile', 'largest'), errors)}"
    )


def training_points(study: Study) -> str:
    """Published training runs at 32B: one number is fitted, the others are predicted."""
    rows = [
        (
            p.what,
            f"{p.measured:.0f} {p.unit}",
            f"{p.predicted:.0f} {p.unit}",
            f"{p.error:+.1%}",
            "fitted" if p.fitted else "predicted",
        )
        for p in published(stored().constants)
    ]
    return table(("Qwen3-32B on H100", "measured", "calibrated", "error", ""), rows)


def field(study: Study) -> str:
    """Published figures that the plan relies on."""
    with FIELD.open(newline="") as file:
        rows = [(row["what"], row["value"], row["source"]) for row in csv.DictReader(file)]
    return table(("published", "value", "source"), rows)


SECTIONS: dict[str, Callable[[Study], str]] = {
    "answer": answer, "inputs": inputs, "estimate": estimate, "configured": configured, "splits": splits,
    "training": training, "generation": generation, "memory": memory, "decode": decode, "latency": latency,
    "runners_up": runners_up, "staleness": staleness, "checkpoints": checkpoints, "what_if": what_if,
    "calibration": calibration, "training_points": training_points, "field": field,
}  # fmt: skip


def report(study: Study, show: Sequence[str] = ()) -> str:
    """Raises ConfigError for a section that does not exist."""
    if unknown := [name for name in show if name not in SECTIONS]:
        raise ConfigError(f"plan.show: there is no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    if len(show) == 1:
        return SECTIONS[show[0]](study)
    return "\n\n".join(f"== {name.replace('_', ' ')} ==\n{SECTIONS[name](study)}" for name in show or SECTIONS)
