"""Arguments that would change what an engine samples are refused, however they are written."""

import argparse

import pytest

from conf.compose.engine_args import REFUSED, check_engine_args
from conf.schema import ConfigError


@pytest.mark.parametrize("name", REFUSED)
def test_every_such_argument_is_refused_with_its_reason(name: str) -> None:
    name = f"{name}steps" if name.endswith("-") else name
    for arguments in ([f"{name}=1"], [name, "1"], [f"{name} 1"], ["--log-level=info", name]):
        with pytest.raises(ConfigError, match=f"rollout.engine_args: {name} .*; "):
            check_engine_args(arguments)


@pytest.mark.parametrize(
    "argument",
    [
        '--preferred-sampling-params={"top_p": 0.5}',
        "--preferred-sampling={}",
        "--speculative-algorithm=NGRAM",
        "--spec",
        "--quant=fp8",
        "--model=other",
        "--lora-paths=a",
        "--config=more.yaml",
    ],
)
def test_an_abbreviation_and_a_whole_family_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine_args: "):
        check_engine_args([argument])


def test_arguments_that_only_change_speed_or_memory_are_taken() -> None:
    check_engine_args(["--context-length=24", "--mem-fraction-static", "0.8", "--attention-backend=fa3", "--a-typo=1", "", "-x"])


@pytest.mark.slow  # the import of sglang
def test_every_refused_name_is_one_of_sglang() -> None:
    arguments = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    arguments.ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert [name for name in REFUSED if not any(o.startswith(name) if name.endswith("-") else o == name for o in known)] == []
