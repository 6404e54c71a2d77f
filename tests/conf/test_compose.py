"""What Hydra composes from the YAML of conf/, and what a user's mistake looks like."""

import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from conf.compose.hydra_errors import SETTINGS
from conf.compose.load import composed as compose
from conf.compose.load import read_run, to_run_config, unchecked, write_run
from conf.compose.other_names import OTHER_NAMES
from conf.compose.presets import check_presets
from conf.schema import RULES, ConfigError, PlanConfig, RunConfig, ShapeConfig

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def composed(*overrides: str) -> RunConfig:
    return to_run_config(compose(["name=test", *overrides]))


def complaint(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(experiment: str) -> None:
    composed(f"experiment={experiment}")


ALGORITHMS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))


@pytest.mark.parametrize(("algorithm", "experiment"), [(a, "debug") for a in ALGORITHMS] + [("dapo", e) for e in EXPERIMENTS[1:]])
def test_an_algorithm_can_be_named_beside_an_experiment(algorithm: str, experiment: str) -> None:
    words = [f"experiment={experiment}", f"algo={algorithm}"]
    check_presets(words, compose(["name=test", *words]))
    config = composed(*words)
    preset = yaml.safe_load((CONF / "algo" / f"{algorithm}.yaml").read_text())
    assert {key: getattr(config.algo, key) for key in preset} == preset


def test_command_line_wins_over_the_experiment() -> None:
    assert composed("experiment=debug").trainer.steps == 50
    assert composed("experiment=debug", "trainer.steps=7").trainer.steps == 7


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in node.items():
        if isinstance(inner, dict):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_an_experiment_sets_is_not_undone_by_a_preset_that_it_chooses(experiment: str) -> None:
    body = yaml.safe_load((CONF / f"experiment/{experiment}.yaml").read_text())
    del body["defaults"]
    config = composed(f"experiment={experiment}")
    assert {key: at(config, key) for key, _ in leaves(body)} == dict(leaves(body))


def named(*overrides: str) -> None:
    words = ["name=test", *overrides]
    check_presets(words, compose(words))


def test_preset_that_the_experiment_would_overrule_is_refused_with_what_to_say() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout=synchronous sets rollout.max_staleness=0, but experiment=debug is applied later and sets 2: add",
    ):
        named("experiment=debug", "rollout=synchronous")
    named("experiment=debug", "rollout=synchronous", "rollout.max_staleness=0")
    named("experiment=debug", "rollout=synchronous", "rollout.max_staleness=2")
    named("experiment=debug", "reward=fraction")
    named("model=debug", "data=debug", "rollout=synchronous", "trainer=cosine")


def test_presets_of_a_run_compose_and_pass_the_checks() -> None:
    for preset in (
        "rollout=synchronous",
        "rollout=bypass",
        "trainer=cosine",
        "reward=fraction",
        "cluster=cpu",
        "cluster=gpu_node",
    ):
        composed("experiment=debug", preset)
    assert composed("experiment=debug", "rollout=bypass").rollout.window == 16


OWN = ("model=folder", "model.path=m", "data=files", "data.train=[a.jsonl]")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("trainer=cosine", "trainer.steps=1"),
        ("experiment=debug",),
        ("experiment=debug", "trainer.steps=1", "algo.minibatches=1"),
        ("experiment=debug", "data.max_prompt_tokens=8000"),
        ("cluster=cpu", "trainer.tp=2", "trainer.sequence_parallel=true", "trainer.cp=3"),
        *((f"algo={algorithm}",) for algorithm in ALGORITHMS),
        ("rollout=bypass",),
        ("rollout=synchronous",),
    ],
    ids=" ".join,
)
def test_own_model_and_problems_need_nothing_else(words: tuple[str, ...]) -> None:
    config = composed(*words, *OWN)
    assert (config.model.path, config.data.train) == ("m", ["a.jsonl"])


def test_secret_that_is_interpolated_never_reaches_the_resolved_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert "holds the value of $WANDB_API_KEY" in complaint("experiment=debug", "trainer.wandb_project=${oc.env:WANDB_API_KEY}")
    assert "0123456789abcdef" not in str(composed("experiment=debug"))


def test_run_that_was_written_is_read_as_it_was_without_what_only_the_planner_reads(tmp_path: Path) -> None:
    config = composed("experiment=debug", "trainer.lr=1e-5", "rollout.engine_args=[--alpha,b]", "plan.prompt_tokens=5")
    write_run(config, tmp_path)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert "plan" not in written and "shape" not in written["model"]
    config.plan, config.model.shape = PlanConfig(), ShapeConfig()
    assert read_run(tmp_path) == config


def test_an_older_run_that_wrote_down_what_the_planner_reads_is_read(tmp_path: Path) -> None:
    config = composed("experiment=debug")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    assert read_run(tmp_path) == config


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine=3", "rollout.engine: no such setting; did you mean rollout.engines?"),
        ("+rollout.engine=3", "rollout.engine: no such setting; did you mean rollout.engines?"),
        ("rolout.engines=3", "rolout.engines: no such setting; did you mean rollout.engines?"),
        ("fleet=3", "fleet: no such setting: docs/settings.md lists all settings"),
        ("learning_rate=1", "learning_rate: no such setting; did you mean trainer.lr?"),
        ("lr=1", "lr: no such setting; did you mean trainer.lr?"),
        ("trainer.learning_rate=1", "trainer.learning_rate: no such setting; did you mean trainer.lr?"),
        ("algo.group-size=1", "algo.group-size: no such setting; did you mean algo.completions_per_group?"),
        ("batch_size=1", "batch_size: no such setting; did you mean algo.groups_per_step?"),
        ("+num_generations=1", "num_generations: no such setting; did you mean algo.completions_per_group?"),
        ("max_tokens=1", "max_tokens: no such setting; did you mean rollout.max_completion_tokens?"),
        ("algo.kl_beta=1", "algo.kl_beta: no such setting; did you mean algo.kl_coef?"),
        ("seed=1", "seed: no such setting; did you mean data.seed or trainer.seed?"),
        ("fit=1", "fit: no such setting: docs/settings.md lists all settings"),
        ("+rollout.engines=3", "+rollout.engines: the setting exists, as all settings do; leave out the +"),
        ("~rollout.engines", "~rollout.engines: a setting cannot be removed; give it another value"),
        ("rollout.engines=many", "rollout.engines=many: must be a whole number"),
        ("rollout.engines=1.5", "rollout.engines=1.5: must be a whole number"),
        ("rollout={engines:many}", "rollout.engines=many: must be a whole number"),
        ("rollout.engines=${name}", "rollout.engines=${…}: must be a whole number"),
        ("trainer.lr=", "trainer.lr=: must be a number"),
        ("dry_run=maybe", "dry_run=maybe: must be true or false"),
        ("name=null", "name=null: must be a text"),
        ("data.train=file", "data.train=file: must be a list of texts, as in data.train=[a,b]"),
        ("data.train=[[a]]", "data.train=[['a']]: must be a list of texts, as in data.train=[a,b]"),
        ("plan=5", "plan=5: plan is a group of settings; set them one by one, as in plan.prompt_tokens=…"),
        ("trainer=5", "trainer=5: choose a preset by its name, trainer=cosine|default"),
        ("trainer=null", "trainer=null: choose a preset by its name, trainer=cosine|default"),
        ("=5", "=5: there is no setting before the `=`; is there a space before it?"),
        ("trainer.tp=0", "trainer.tp=0: must be at least 1"),
        (
            "model=unknown",
            "model=unknown: there is no such preset; the presets are "
            "debug, debug_math, debug_student, folder, kestrel_32b, qwen2_5_coder_32b, qwen3_32b, smollm2",
        ),
        (
            "algo=grop",
            "algo=grop: there is no such preset; did you mean grpo? "
            "the presets are cispo, dapo, default, dr_grpo, grpo, gspo, rloo",
        ),
        ("modle=debug", "modle: no such setting; did you mean model?"),
        (
            "output=/data/a b/ü",
            "output=/data/a b/ü: cannot be read as KEY=VALUE (LexerNoViableAltException: output=/data/a b/ü); put the value in "
            "quotes, and the whole word in quotes for the shell: 'output=\"/data/a b/ü\"'",
        ),
        ("rollout.engines=[1", "rollout.engines=[1: cannot be read as KEY=VALUE (no viable alternative at input '[1')"),
    ],
)
def test_mistake_is_one_line_that_names_the_setting(override: str, said: str) -> None:
    assert complaint("experiment=debug", override) == said


KINDS = {kind: [key for key in SETTINGS if SETTINGS[key] == kind] for kind in (bool, int, float, str, list[str])}
WRONG: dict[Any, list[Any]] = {
    bool: ["maybe", None, [True]],
    int: ["ten", 1.5, None, [1], {"a": 1}],
    float: ["ten", None, [1.0]],
    str: [None, ["a"], {"a": 1}],
    list[str]: ["a", 5, None, {"a": "b"}, [None], [["a"]], [{"a": "b"}]],
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_value_of_a_wrong_type_is_refused_in_one_line_for_every_setting(kind: Any) -> None:
    assert len(KINDS[kind]) >= len(WRONG[kind])
    for key, value in zip(KINDS[kind], cycle(WRONG[kind]), strict=False):
        said = OmegaConf.create({})
        OmegaConf.update(said, key, value, merge=False)
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}=[^\n]+: must be (a|true) [^\n]+\Z"):
            unchecked(said)


def test_no_experiment_is_a_mistake_that_names_those_there_are() -> None:
    said = "choose an experiment, one of experiment=debug, experiment=debug_distill, experiment=debug_math, "
    said += "experiment=kestrel_256, experiment=smollm2; or a model and data, model=… data=…"
    assert complaint() == complaint("trainer.steps=ten") == said


def test_model_without_a_path_is_refused() -> None:
    assert complaint("experiment=debug", "model.path=???").startswith("model.path: ")


def test_every_word_of_other_trainers_stands_for_a_setting_and_is_none_itself() -> None:
    assert [word for word, setting in OTHER_NAMES.items() if setting not in RULES] == []
    own = {key.rpartition(".")[2] for key in SETTINGS}
    assert sorted(own & OTHER_NAMES.keys()) == []
