"""What is no secret passes, what is one is refused by its name and never shown."""

import pytest

from conf.compose.secrets import refuse_secrets
from conf.schema import ConfigError

SECRET = "s3cr3t-value"


def refusal(values: object, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_secrets(values, environment or {})
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_value_of_a_secret_variable_is_refused_by_name_and_not_shown() -> None:
    values = {"trainer": {"wandb_project": "p"}, "rollout": {"engine_args": ["--x", f"--auth={SECRET}"]}}
    refuse_secrets(values, {"HOME": SECRET, "MONKEY": SECRET, "PIN_TOKEN": "value", "HF_TOKEN_PATH": SECRET})
    assert "rollout.engine_args holds the value of $HF_TOKEN" in refusal(values, {"HF_TOKEN": SECRET})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"export SECRET={SECRET}", "SECRET"),
        (f"export HF_TOKEN='{SECRET}'", "HF_TOKEN"),
        (f'module load cuda; WANDB_API_KEY="{SECRET}" ; export WANDB_API_KEY', "WANDB_API_KEY"),
        (f"export A=b aws_secret_access_key={SECRET}", "aws_secret_access_key"),
        (f"--export=ALL,DB_PASSWORD={SECRET}", "DB_PASSWORD"),
        (f"--api-key={SECRET}", "api-key"),
        (f"export HF_TOKEN=${{HF_TOKEN:-{SECRET}}}", "HF_TOKEN"),
        (f"export HF_TOKEN=$(echo {SECRET})", "HF_TOKEN"),
        (f"export https_proxy=http://me:{SECRET}@proxy:3128", "an address with a password"),
    ],
)
def test_secret_that_a_set_up_line_gives_is_refused_with_the_way_to_do_it(line: str, name: str) -> None:
    said = refusal({"cluster": {"setup": ["module load x", line]}})
    assert f"cluster.setup holds {'' if ' ' in name else 'a value for '}{name}" in said
    assert "sbatch passes its environment on" in said and "secrets.sh" in said


def test_secret_that_is_an_options_next_word_is_refused() -> None:
    assert "a value for --api-key" in refusal({"rollout": {"engine_args": ["--api-key", SECRET]}})


@pytest.mark.parametrize(
    "line",
    [
        ". ~/secrets.sh",
        "export HF_TOKEN=$(cat ~/.hf_token)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=${MY_TOKEN}",
        "export HF_TOKEN_PATH=/home/me/.hf_token",
        "unset HF_TOKEN",
        "export NCCL_IB_PKEY=0x8001 NCCL_IB_HCA=mlx5",
        "--max-total-tokens=4096",
        "export https_proxy=http://$USER:$PROXY_PASSWORD@proxy:3128",
        "hf://org/name?split=train",
        "tcp://10.0.0.1:5555",
    ],
)
def test_what_holds_no_secret_passes(line: str) -> None:
    refuse_secrets({"cluster": {"setup": [line]}}, {})
