"""A run on GPUs beside the calibrated plan's prediction of it: by what factor trainer and engines differ from the calibration."""

from copy import deepcopy
from statistics import fmean

from conf.schema import ConfigError, RunConfig
from launch.plan.table import table
from launch.simulate.fit import PROMPT_SHARE
from launch.simulate.measured_run import MeasuredRun
from launch.simulate.options import Options, scenario_of
from launch.simulate.simulation import simulate
from launch.simulate.simulation_report import steady
from launch.simulate.step_figures import StepFigures, measured_figures, simulated_figures


def beside_plan(run: MeasuredRun, steps: int) -> str:
    config = _with_lengths_of(run)
    try:
        scenario = scenario_of(config, Options(failures=False, steps=min(steps, config.trainer.steps)))
    except ConfigError as error:
        return f"The planner cannot predict this run, so there is no comparison with a plan: {error}"
    predicted = simulated_figures(steady(simulate(scenario).steps, scenario.rules.lead), config.rollout.engines)
    measured = measured_figures(run.warm)
    planned_values = _values(predicted)
    rows = [
        (what, f"{planned_values[what]:.2f}", f"{value:.2f}", _ratio(value, planned_values[what]))
        for what, value in _values(measured).items()
    ]
    return (
        f"{table(('this run', 'the plan', 'measured', 'measured / plan'), rows)}\n"
        f"The trainer takes {_ratio(_passes_s(measured), _passes_s(predicted))} times as long as planned, and a busy fleet "
        f"samples at {_ratio(measured.busy_tokens_per_s, predicted.busy_tokens_per_s)} times the planned rate."
    )


def _with_lengths_of(run: MeasuredRun) -> RunConfig:
    """Completions are as long as measured. Metrics do not hold the prompts' lengths, so the planner's mean is bounded."""
    config = deepcopy(run.config)
    config.plan.prompt_tokens = min(config.plan.prompt_tokens, PROMPT_SHARE * config.data.max_prompt_tokens)
    completions = config.algo.groups_per_step * config.algo.completions_per_group
    config.plan.completion_tokens = fmean(line["tokens/trained"] for line in run.warm) / completions
    return config


def _values(figures: StepFigures) -> dict[str, float]:
    return {
        "step": figures.step_s,
        **figures.phases_s,
        "trainer idle": figures.trainer_idle,
        "rollout idle": figures.engines_idle,
        "busy tokens/s": figures.busy_tokens_per_s,
    }


def _passes_s(figures: StepFigures) -> float:
    return figures.phases_s["train"] + figures.phases_s["old log-probs"]


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of > 1e-9 else "-"
