"""Checks of the other models of a run, which are given as folders: a teacher and a judge model.

A teacher has the model's tokenizer, and in the place of the reference it has the model's shape. A judge model has a chat
template. On a server of its own, either may be of any architecture that SGLang knows.
"""

from pathlib import Path

from conf.shapes import ModelError, check_same_shape, read_shape
from launch.doctor.case import Case
from launch.doctor.finding import Check, Finding, failure, ok, skipped
from rollout.prompts.problems import ProblemError
from rollout.prompts.render import load_tokenizer


def teacher(case: Case) -> Finding:
    algo, model = case.config.algo, case.config.model.path
    if not algo.teacher:
        return skipped("the run has no teacher (algo.teacher)")
    if algo.teacher_has_address:
        return skipped(f"the workers examine {algo.teacher} when they start")
    if case.made_later(algo.teacher) or case.made_later(model):
        return skipped(f"{algo.teacher} or the model is made at the launch (model.prepare={case.config.model.prepare})")
    if not (Path(algo.teacher) / "config.json").is_file():
        remedy = "give a Hugging Face folder, or the address of an SGLang server as http://host:port"
        return failure(f"algo.teacher={algo.teacher}: no such model folder", remedy)
    try:
        if algo.teacher_is_reference:
            check_same_shape(read_shape(model), read_shape(algo.teacher))
        theirs, ours = (load_tokenizer(folder).get_vocab() for folder in (algo.teacher, model))
    except (ModelError, ProblemError) as error:
        return failure(str(error), "name another teacher, or the address of an SGLang server that holds it")
    if theirs != ours:
        token, _ = min(theirs.items() ^ ours.items(), key=lambda item: item[1])
        return failure(
            f"algo.teacher={algo.teacher} has another tokenizer than model.path={model}: {token!r} is token {theirs.get(token)} "
            f"of the teacher and token {ours.get(token)} of the model",
            "choose a teacher with the model's tokenizer: it is asked about token ids",
        )
    return ok(f"{algo.teacher}, in the {'trainer' if algo.teacher_is_reference else 'fleet, on an engine of its own'}")


def judge_model(case: Case) -> Finding:
    folder = case.config.reward.judge_model
    if not folder:
        return skipped("the run serves no judge model (reward.judge_model)")
    if case.made_later(folder):
        return skipped(f"{folder} is made at the launch (model.prepare={case.config.model.prepare})")
    if not (Path(folder) / "config.json").is_file():
        remedy = "give a Hugging Face folder, or leave the setting out and give the tasks the `url` of an endpoint"
        return failure(f"reward.judge_model={folder}: no such model folder", remedy)
    try:
        has_template = bool(load_tokenizer(folder).chat_template)
    except ProblemError as error:
        return failure(str(error), "name another judge model, or give the tasks the `url` of an endpoint")
    if not has_template:
        return failure(f"reward.judge_model={folder} has no chat template", "choose a model that was trained to chat")
    return ok(f"{folder}, in the fleet, on an engine of its own")


CHECKS = (Check(name="teacher", run=teacher), Check(name="judge model", run=judge_model))
