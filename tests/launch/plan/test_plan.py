"""The planner's sums under `stated`, with the arithmetic written out, and the laws that any plan keeps."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.compose.load import register, to_run_config
from conf.schema import ConfigError, RunConfig
from conf.shapes import Layout, ModelShape
from launch.plan.calibration import stored
from launch.plan.generation import FleetSetup, GenerationCost, sequences_that_fit
from launch.plan.inputs import LengthDistribution
from launch.plan.model_costs import kv_bytes_per_token
from launch.plan.plan_report import inputs, report
from launch.plan.points import H100
from launch.plan.reliability import gathered_bytes, reliability, save_stall_s
from launch.plan.search import MOST_NODES, Search, least, setups
from launch.plan.speed import Speed, stated
from launch.plan.study import CALIBRATED, STATED, WHAT_IFS, Study, make_study
from launch.plan.training import USABLE, TrainerSetup, push_s, training_cost, training_memory


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        yield


def config(*overrides: str) -> RunConfig:
    return to_run_config(compose("config", overrides=["name=test", "experiment=kestrel_256", *overrides]))


@pytest.fixture(scope="module")
def study(_hydra: None) -> Study:
    return make_study(config())


KESTREL = ModelShape(
    architecture="Qwen2ForCausalLM", stated_parameters=32 * 10**9, layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128,
    ffn=27648, vocabulary=152064,
)  # fmt: skip
SETUP = TrainerSetup(layout=Layout(tp=8, sequence_parallel=True), dp=19, tokens_per_microbatch=20480)
SIXTEEN_NODES = replace(SETUP, dp=16)


def lines_of(study: Study, setup: TrainerSetup = SETUP) -> dict[str, float]:
    cost = training_cost(study.workload, study.searches[STATED].speed, setup)
    return {line.name: line.gpu_s for line in cost.lines}


# The sheet's figures, by hand.


def test_tokens_of_a_step(study: Study) -> None:
    assert study.workload.completions == 512 * 8 == 4096
    assert study.workload.generated_tokens == pytest.approx(4096 * 2500)  # 10.24 M
    assert study.workload.trained_tokens == pytest.approx(4096 * (1200 + 2500))  # 15.1552 M


def test_kv_cache_is_256_kib_a_token(study: Study) -> None:
    assert kv_bytes_per_token(study.model) == 2 * 8 * 128 * 64 * 2 == 262_144


def test_training_is_6_n_flops_a_token_at_40_percent_of_peak(study: Study) -> None:
    # 6 x 32e9 x 15,155,200 = 2.9098e18 FLOP; / (0.40 x 989e12 = 395.6e12) = 7,355.4 GPU-seconds
    assert lines_of(study)["forward, backward"] == pytest.approx(2.9098e18 / 395.6e12, rel=1e-4)
    assert lines_of(study)["forward, backward"] == pytest.approx(7355.4, abs=0.1)


def test_logprobs_are_2_n_flops_per_token_and_the_first_of_four_minibatches_saves_its_old_ones(study: Study) -> None:
    # 2 x 32e9 x 15,155,200 = 9.6993e17 FLOP; / 395.6e12 = 2,451.8 GPU-seconds
    assert lines_of(study)["old log-probs"] == pytest.approx(0.75 * 2451.8, abs=0.1)
    assert lines_of(study)["reference log-probs"] == pytest.approx(2451.8, abs=0.1)
    assert lines_of(make_study(config("trainer.reuse_first_forward=false")))["old log-probs"] == pytest.approx(2451.8, abs=0.1)
    assert "old log-probs" not in lines_of(make_study(config("algo.minibatches=1")))


def test_without_a_kl_penalty_there_is_no_reference() -> None:
    assert "reference log-probs" not in lines_of(make_study(config("algo.kl_coef=0")))


def test_prefill_is_2_n_flops_a_token(study: Study) -> None:
    # TP4, 1,200 tokens: 2 x 32e9 x 1200 = 7.68e13 FLOP, attention 4 x 40 x 128 x 64 x 1200^2 / 2 = 9.44e11
    seconds = (7.68e13 + 9.437184e11) / (4 * 395.6e12)
    assert study.searches[STATED].speed.prefill_s(4, 1200) == pytest.approx(seconds)  # 49.1 ms


@pytest.mark.parametrize(
    ("tp", "sequences", "milliseconds"),
    [
        # (64e9 weights + sequences x 2,450 tokens x 262,144 bytes) / (tp x 0.75 x 3.35e12 = tp x 2.5125e12)
        (2, 32, (64e9 + 20.552e9) / 5.025e12 * 1e3),  # 16.83
        (2, 64, (64e9 + 41.104e9) / 5.025e12 * 1e3),  # 20.92
        (4, 32, (64e9 + 20.552e9) / 10.05e12 * 1e3),  # 8.41
        (4, 64, (64e9 + 41.104e9) / 10.05e12 * 1e3),  # 10.46
        (4, 128, (64e9 + 82.208e9) / 10.05e12 * 1e3),  # 14.55
        (8, 128, (64e9 + 82.208e9) / 20.1e12 * 1e3),  # 7.27
        (8, 256, (64e9 + 164.416e9) / 20.1e12 * 1e3),  # 11.36
        (8, 512, (64e9 + 328.833e9) / 20.1e12 * 1e3),  # 19.54
    ],
)
def test_decode_step_reads_weights_and_cache_at_75_percent_of_bandwidth(
    study: Study, tp: int, sequences: int, milliseconds: float
) -> None:
    assert study.searches[STATED].speed.decode_step_s(tp, sequences, 2450) * 1e3 == pytest.approx(milliseconds, rel=1e-4)


def test_an_engine_of_two_gpus_holds_275_thousand_tokens(study: Study) -> None:
    # 2 x 80e9 x 0.85 - 64e9 = 72e9 bytes / 262,144 = 274,658 tokens; one GPU has room for 15,259, less than one long completion
    speed = study.searches[STATED].speed
    assert speed.kv_tokens(2) == pytest.approx(274_658, abs=1)
    assert 0 < speed.kv_tokens(1) < study.workload.longest_tokens


def test_training_state_is_448_gb_and_22_seconds_of_storage(study: Study) -> None:
    # bf16 weights, fp32 master weights, two fp32 moments: 2 + 4 + 4 + 4 = 14 bytes x 32e9; / 20e9 bytes a second
    found = reliability(study.searches[STATED].speed, SIXTEEN_NODES, steps=600, step_s=100)
    assert found.state_bytes == 14 * 32e9 == 448e9
    assert found.write_s == pytest.approx(22.4)


def test_three_failures_are_expected_in_48_hours(study: Study) -> None:
    # 32 nodes x 2 days / 20 days a failure = 3.2; one every 15 hours
    found = reliability(study.searches[STATED].speed, SIXTEEN_NODES, steps=1, step_s=48 * 3600)
    assert found.job_mtbf_s == pytest.approx(15 * 3600)
    assert 48 * 3600 / found.job_mtbf_s == pytest.approx(3.2)


def test_checkpoint_interval_is_youngs(study: Study) -> None:
    # 16 trainer nodes: one fails every 20 / 16 = 1.25 days = 108,000 s; sqrt(2 x 22.4 x 108000) = 2,199.6 s
    found = reliability(study.searches[STATED].speed, SIXTEEN_NODES, steps=600, step_s=100)
    assert found.young_blocking_s == pytest.approx(2199.6, abs=0.1)


def test_a_save_gathers_48_gb_a_rank_and_holds_the_trainer_for_three_seconds(study: Study) -> None:
    # 12 bytes x 32e9 / 8 = 48e9: 15/16 of it over 0.75 x 50e9 a second = 1.2 s, all of it over 25e9 = 1.92 s
    speed = study.searches[STATED].speed
    assert gathered_bytes(speed, SIXTEEN_NODES) == pytest.approx(48e9)
    assert save_stall_s(speed, SIXTEEN_NODES) == pytest.approx(1.2 + 1.92)


def test_host_memory_of_a_trainer_node_is_told_with_its_reason(study: Study) -> None:
    # 8 ranks x 4e9 parameters x (12 gathered + 2 of the reference) = 448e9; with one bucket 8 x 4e9 x (20 + 2) = 704e9
    said = report(study, ["checkpoints"])
    assert re.search(r"^host memory per trainer node +448\.0 GB +448\.0 GB$", said, re.MULTILINE)
    assert "12 bytes per parameter of a rank's share, on every data-parallel rank" in said
    one_bucket = report(
        make_study(config("trainer.overlap_grad_reduce=false", "trainer.overlap_param_gather=false")), ["checkpoints"]
    )
    assert re.search(r"^host memory per trainer node +704\.0 GB +704\.0 GB$", one_bucket, re.MULTILINE)


def test_sandboxes_take_32_seconds_of_the_pool(study: Study) -> None:
    # 4,096 x 8 s = 32,768 core-seconds over 1,024 cores
    assert study.best[STATED].seconds["sandboxes"] == 4096 * 8 / 1024 == 32.0


def test_push_leaves_through_one_nic_a_pipeline_stage(study: Study) -> None:
    # 64e9 bytes / (PP x 0.75 x 50e9)
    speed = study.searches[STATED].speed
    assert push_s(speed, SETUP) == pytest.approx(64e9 / 37.5e9)
    assert push_s(speed, replace(SETUP, layout=Layout(tp=8, pp=4, sequence_parallel=True))) == pytest.approx(64e9 / 150e9)


def test_memory_of_a_trainer_gpu(study: Study) -> None:
    memory = training_memory(study.model, SETUP)
    assert memory.weights == pytest.approx(2 * 32e9 / 8)
    assert memory.gradients == pytest.approx(4 * 32e9 / 8)
    assert memory.optimizer == pytest.approx(12 * 32e9 / 8 / 19)
    # a layer keeps 2 bytes x (4 x 5120 + 2 x 40 x 128 + 2 x 8 x 128 + 3 x 27648) = 231,424 a token; 64 layers, 20,480 tokens,
    # over TP8
    assert memory.activations == pytest.approx(231_424 * 64 * 20_480 / 8)


# The laws of a plan.


@pytest.mark.parametrize("name", [STATED, CALIBRATED])
def test_plan_meets_the_target_within_memory_and_staleness(study: Study, name: str) -> None:
    plan = study.best[name]
    assert plan.hours < 48
    assert plan.training.setup.gpus + plan.generation.fleet.gpus <= 256
    assert plan.training.memory.bytes <= USABLE * 80e9
    assert plan.generation.running <= sequences_that_fit(study.workload, plan.speed, plan.generation.fleet.tp)
    assert plan.generation.longest_s + study.workload.sandbox_s <= plan.max_staleness * plan.step_s + 1e-6


@pytest.mark.parametrize("name", [STATED, CALIBRATED])
def test_lines_add_up_to_the_step(study: Study, name: str) -> None:
    plan = study.best[name]
    assert sum(line.gpu_s for line in plan.training.lines) == pytest.approx(plan.training.step_s * plan.training.setup.gpus)
    assert sum(line.gpu_s for line in plan.generation.lines) == pytest.approx(plan.generation.step_s * plan.generation.fleet.gpus)


def test_fewest_gpus_meet_the_target_and_one_node_less_does_not(study: Study) -> None:
    for search in study.searches.values():
        fewest = search.fewest()
        assert fewest is not None
        assert fewest.hours <= 48
        assert search.on(fewest.speed.cluster.nodes - 1).best.hours > 48


def test_target_out_of_reach_has_no_fewest() -> None:
    assert make_study(config("plan.target_hours=1")).searches[STATED].fewest() is None


def test_one_version_less_is_never_faster(study: Study) -> None:
    for search in study.searches.values():
        steps = [plan.step_s for s in range(5) if (plan := search.best_with(staleness=(s,)))]
        assert all(more <= less * 1.011 for less, more in pairwise(steps))


def test_synchronous_step_ends_with_its_longest_completion(study: Study) -> None:
    plan = study.searches[STATED].best_with(staleness=(0,))
    assert plan is not None
    alone_s = 16_384 * plan.speed.decode_step_s(plan.generation.fleet.tp, 1, 1200)
    assert plan.step_s > plan.training.step_s + alone_s


def test_what_ifs_change_what_they_say(study: Study) -> None:
    search = study.searches[CALIBRATED]
    found = {change.what: change.unchanged_split(search.best) for change in WHAT_IFS}
    planned = found["as planned"]
    assert planned.step_s == pytest.approx(search.best.step_s)
    assert found["completions twice as long"].workload.lengths.mean_tokens == 5000
    assert found["engines 2 times slower"].generation.gpu_s > 1.8 * planned.generation.gpu_s
    assert found["tests take 30 s"].seconds["sandboxes"] == pytest.approx(120)
    assert found["no KL penalty"].training.gpu_s < planned.training.gpu_s
    assert found["nodes fail 4 times as often"].hours > planned.hours


def test_of_plans_as_short_the_least_stale_wins(study: Study) -> None:
    plan = study.best[STATED]
    staler = replace(plan, max_staleness=plan.max_staleness + 1)
    assert least([staler, plan]).max_staleness == plan.max_staleness


def test_faster_gpus_never_make_a_slower_plan(study: Study) -> None:
    search = study.searches[STATED]
    faster = replace(search.speed, cluster=replace(search.speed.cluster, flops=2 * 989e12, hbm_bytes_s=2 * 3.35e12))
    assert replace(search, speed=faster).best.step_s < search.best.step_s


@settings(max_examples=25, deadline=None)
@given(
    mean=st.floats(10, 12_000), sigma=st.floats(0.2, 2.0), cap=st.sampled_from([16_384, 32_768]),
)  # fmt: skip
def test_cut_lengths_have_the_mean_that_was_asked_for(mean: float, sigma: float, cap: int) -> None:
    lengths = LengthDistribution(mean_tokens=mean, cap_tokens=cap, sigma=sigma)
    expected = sum(longer for _, longer in lengths.survival) * cap / len(lengths.survival)  # the mean is the survival's integral
    assert expected == pytest.approx(mean, rel=0.1, abs=cap / len(lengths.survival))
    assert lengths.mean_square >= mean**2 * 0.999


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), few=st.integers(1, 200), more=st.integers(1, 200), context=st.floats(100, 10_000),
    calibrated=st.booleans(),
)  # fmt: skip
def test_more_sequences_take_longer_a_step_but_less_each(tp: int, few: int, more: int, context: float, calibrated: bool) -> None:
    speed = Speed(model=KESTREL, cluster=H100, constants=stored().constants if calibrated else stated())
    less_s, more_s = speed.decode_step_s(tp, few, context), speed.decode_step_s(tp, few + more, context)
    assert less_s < more_s
    assert more_s / (few + more) < less_s / few
    assert speed.decode_step_s(tp, few, context) > speed.decode_step_s(2 * tp, few, context)


def test_push_costs_what_is_in_flight(study: Study) -> None:
    speed = study.searches[STATED].speed
    costs = [
        GenerationCost(
            workload=study.workload, speed=speed, fleet=FleetSetup(engines=16, tp=8, concurrency=n), push_s=1.0, running=n
        ).gpu_s_by_part["prefill: after the push"]
        for n in (32, 64)
    ]  # fmt: skip
    assert costs[1] == pytest.approx(2 * costs[0])


# Other models, and wrong ones.


def test_model_folder_is_read_when_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,'
        ' "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,'
        ' "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}'
    )
    model = make_study(config(f"model.path={tmp_path}")).model
    assert model.parameters == pytest.approx(32.76e9, rel=1e-3)  # Qwen3-32B says 32.8B
    assert model.heads == 64


def test_key_value_heads_are_replicated_where_ranks_are_a_multiple_of_them() -> None:
    few = ["model.shape.heads=40", "model.shape.kv_heads=2", "trainer.tp=4", "rollout.engine_tp=4"]
    speed = make_study(config(*few)).searches[STATED].speed
    assert kv_bytes_per_token(speed.model, 4) == 2 * kv_bytes_per_token(speed.model, 2) == 2 * kv_bytes_per_token(speed.model)


LLAMA_70B = ModelShape(
    name="70b", architecture="LlamaForCausalLM", stated_parameters=70_600_000_000, layers=80, hidden=8192, heads=64, kv_heads=8,
    head_dim=128, ffn=28672, vocabulary=128256,
)  # fmt: skip


def test_pipelines_of_any_depth_that_divides_the_layers_are_tried() -> None:
    """80 layers on 40 GPUs: neither 2, 4 nor 8 stages leave whole replicas that fit."""
    seventy = replace(make_study(config()).searches[CALIBRATED].speed, model=LLAMA_70B)
    found = {setup.layout.pp for setup in setups(seventy, 40, 20_480, 1)}
    assert found == {1, 2, 4, 5, 8, 10}


def test_few_splits_of_a_very_large_cluster_are_tried() -> None:
    search = make_study(config()).searches[STATED]
    assert len(search.on(100_000).trainer_gpus) <= MOST_NODES
    assert search.on(256).trainer_gpus.step == 8


def test_run_that_would_never_end_is_refused_with_its_reason() -> None:
    """Failures are made good while others happen: when they come faster than that, no time is enough."""
    study = make_study(config("plan.node_mtbf_days=0.001"))
    with pytest.raises(ConfigError, match=r"plan.node_mtbf_days=0.001: one of \d+ trainer nodes fails every \d+ s .* no run"):
        _ = study.best
    assert not isfinite(reliability(study.searches[STATED].speed, SETUP, steps=600, step_s=90.0).run_s)


def test_failures_cost_time_in_which_nodes_fail_too(study: Study) -> None:
    # a step of 100 s, saved every k steps of 3.1 s stall; T = steps x (100 + 3.1 / k) + T x lost / MTBF
    found = reliability(study.searches[STATED].speed, SIXTEEN_NODES, steps=600, step_s=100)
    work_s = 600 * (100 + found.stall_s / found.interval_steps)
    assert found.run_s == pytest.approx(work_s + found.trainer_failures * found.lost_s_per_failure)


def test_lost_node_is_no_what_if_where_none_would_be_left(study: Study) -> None:
    small = replace(study, cluster=replace(study.cluster, nodes=1))
    assert {"one node is lost", "two nodes are"} & {change.what for change in small.what_ifs} == set()
    assert {change.what for change in study.what_ifs} == {change.what for change in WHAT_IFS}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.tp=16", "trainer.tp=16 does not divide the 40 attention heads of kestrel-32b; choose one of 1, 2, 4, 8$"),
        ("trainer.pp=5", "trainer.pp=5 does not divide the 64 layers of kestrel-32b; choose one of 1, 2, 4, 8"),
        ("cluster.gpus_per_node=4", "reaches beyond a node of 4 GPUs .*; trainer.tp=4 is the largest that does not"),
        (
            "rollout.engine_tp=3",
            "rollout.engine_tp=3 does not divide the 40 attention heads .*; choose one of 1, 2, 4, 8$",
        ),
        ("plan.completion_tokens=20000", "must lie between 0 and rollout.max_completion_tokens=16384"),
        ("plan.length_sigma=50", "plan.length_sigma=50: .* at most 5"),
        ("plan.compute_fraction=1.5", "plan.compute_fraction=1.5: must be above 0 and at most 1"),
        ("model.shape.parameters=-1", "model.shape.parameters=-1: must be at least 0"),
        ("model.shape.heads=7", "trainer.tp=8 does not divide the 7 attention heads of kestrel-32b; choose one of 1$"),
        ("rollout.engine_tp=16", "rollout.engine_tp=16 does not divide the 40 attention heads"),
        ("cluster.nodes=-3", "cluster.nodes=-3: must be at least 1"),
        ("plan.completion_tokens=nan", "plan.completion_tokens=nan: must be a finite number"),
        ("plan.prompt_tokens=0", "plan.prompt_tokens=0.0: must be above 0"),
        ("plan.prompt_tokens=5000", "plan.prompt_tokens=5000: the mean prompt cannot be longer than data.max_prompt_tokens=4096"),
        ("plan.hbm_gb_s=0", "plan.hbm_gb_s=0.0: must be above 0"),
        ("cluster.nodes=0", "cluster.nodes=0: must be at least 1"),
        ("model.shape.kv_heads=0", "model.shape.kv_heads=0: give model.path a Hugging Face folder"),
    ],
)
def test_wrong_input_names_the_setting_and_what_works(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_study(config(override))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.engine_tp=1"], "cannot hold the weights .* rollout.engine_tp=2"),
        (["trainer.dp=32"], "the cluster has 256: trainer.dp=22 rollout.engines=20 fit"),
        (
            ["algo.teacher=t", "algo.teacher_on=engine", "algo.teacher_tp=8"],
            "the cluster has 248, beside 8 for a teacher or judge model: trainer.dp=",
        ),
        (["cluster.nodes=12"], "the cluster has 96: trainer.dp=6 rollout.engines=12 fit"),
        (
            ["trainer.tp=1", "trainer.dp=1", "trainer.sequence_parallel=false"],
            "needs .* GB of a GPU, and 74 GB are usable; TP8 PP1 DP2",
        ),
        (["trainer.sequence_parallel=false"], "and 74 GB are usable; trainer.sequence_parallel=true does"),
        (["trainer.dp=3"], "needs .* usable; trainer.recompute=full does"),
    ],
)
def test_run_that_cannot_be_as_configured_is_told_what_could(overrides: list[str], said: str) -> None:
    study = make_study(config(*overrides))
    with pytest.raises(ConfigError, match=said):
        _ = study.configured
    assert study.misfit


def test_no_plan_uses_the_gpus_of_a_judge_model(study: Study) -> None:
    judged = make_study(config("reward.judge_model=j", "reward.judge_model_tp=8"))
    for name, search in judged.searches.items():
        for plan in search.splits:
            assert plan.training.setup.gpus + plan.generation.fleet.gpus <= 248
        assert judged.best[name].step_s >= study.best[name].step_s
    assert "8 for a teacher or judge model" in inputs(judged)


def test_configured_run_that_fits_has_no_complaint(study: Study) -> None:
    assert study.misfit == ""
    assert study.configured[STATED].training.setup.gpus == 136


@pytest.mark.parametrize("nodes", [12, 31])
def test_what_a_misfit_proposes_fits(nodes: int) -> None:
    proposed = re.findall(r"(?:trainer\.dp|rollout\.engines)=\d+", make_study(config(f"cluster.nodes={nodes}")).misfit)
    assert len(proposed) == 2
    assert make_study(config(f"cluster.nodes={nodes}", *proposed)).misfit == ""


def test_the_job_is_configured_as_the_plan_says(study: Study) -> None:
    """The experiment's file holds the calibrated plan's layout, staleness and checkpoint interval."""
    configured, best = study.configured[CALIBRATED], study.best[CALIBRATED]
    assert str(configured) == str(best)
    assert study.config.trainer.checkpoint_every == best.reliability.interval_steps
    assert best.max_staleness == ceil((best.generation.longest_s + study.workload.sandbox_s) / best.step_s)


def test_a_node_lost_for_good_is_the_fleet_s_and_costs_little(study: Study) -> None:
    lost = next(change for change in WHAT_IFS if change.what == "one node is lost")
    plan = study.best[CALIBRATED]
    after = lost.unchanged_split(plan)
    assert after.generation.fleet.engines == plan.generation.fleet.engines - 8 // plan.generation.fleet.tp
    share = plan.generation.fleet.engines / after.generation.fleet.engines  # of a fleet that limited the step before
    assert plan.step_s <= after.step_s < share * plan.step_s


def test_cluster_that_is_too_small_is_told_the_size_that_is_not() -> None:
    small = make_study(config("cluster.nodes=1")).searches[STATED]
    with pytest.raises(ConfigError, match=r"the fewest that can are cluster\.nodes=(\d+)") as caught:
        _ = small.best
    nodes = int(str(caught.value).rpartition("=")[2])
    assert small.on(nodes).best
    with pytest.raises(ConfigError):
        _ = small.on(nodes - 1).best


def test_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="fits no layout on GPUs of 80 GB"):
        _ = make_study(config("model.shape.parameters=700000000000")).searches[STATED].best


def test_searches_do_not_depend_on_the_set_that_came_first(study: Study) -> None:
    assert list(study.searches) == [STATED, CALIBRATED]
    fresh = Search(
        workload=study.workload, speed=study.searches[CALIBRATED].speed, tokens_per_microbatch=20480, staleness_limit=4, max_cp=1
    )
    assert fresh.best.step_s == study.best[CALIBRATED].step_s


def test_one_node_is_split_by_gpus() -> None:
    small = make_study(
        config(
            "cluster.nodes=1", "model.shape.parameters=1500000000", "model.shape.layers=28", "model.shape.hidden=1536",
            "model.shape.heads=12", "model.shape.kv_heads=2", "model.shape.ffn=8960", "model.shape.vocabulary=151936",
            "trainer.tp=1", "trainer.sequence_parallel=false", "rollout.engine_tp=1",
        )
    )  # fmt: skip
    for plan in small.best.values():
        assert plan.training.setup.gpus + plan.generation.fleet.gpus <= 8
        assert plan.generation.fleet.engines >= 1
        assert plan.split == f"{plan.training.setup.gpus} + {8 - plan.training.setup.gpus}"
