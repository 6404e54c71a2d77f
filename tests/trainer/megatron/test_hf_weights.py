"""Folders are read and written as transformers expects them, tensor for tensor."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conf.shapes import Layout, read_shape
from rollout.engine_process import Engine, EngineSettings
from tests.ports import free_port
from tests.trainer import jobs, ranks
from tests.trainer.push.test_push import complete, greedy
from trainer.megatron.hf_weights import hf_manifest
from trainer.preview import accepts


def test_a_written_folder_loads_in_transformers_and_is_the_same_model(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    made = jobs.make_model(source, "qwen2-tied")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("stale")
    target.mkdir()
    (target / "older_file").write_text("")
    ranks.run(jobs.save_folder, 2, str(source), str(target), Layout(pp=2), 2**30)
    files = {path.name for path in target.iterdir()}
    assert files == {
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    read_back = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(values, read_back.state_dict()[key]) for key, values in made.state_dict().items())
    torch.testing.assert_close(jobs.expected_logits(read_back), jobs.expected_logits(made), atol=1e-6, rtol=0)
    assert not list(tmp_path.glob("*.partial"))


def test_large_models_are_split_into_files_and_read_from_them(tmp_path):
    source, first, second = (tmp_path / name for name in ("source", "first", "second"))
    made = jobs.make_model(source, "qwen3")
    ranks.run(jobs.save_folder, 2, str(source), str(first), Layout(tp=2), 100_000)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in first.glob("*.safetensors")]
    assert len(sizes) > 4
    assert max(sizes) < 110_000
    assert index["metadata"]["total_size"] == sum(4 * values.numel() for values in made.state_dict().values())
    ranks.run(jobs.save_folder, 1, str(first), str(second), Layout(), 2**30)
    written = load_file(second / "model.safetensors")
    assert all(torch.equal(written[key], values) for key, values in made.state_dict().items())


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, vpp=2)])
@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "qwen3"])
def test_the_manifest_lists_the_folder_without_a_model(tmp_path, family, layout):
    made = jobs.make_model(tmp_path, family)
    shape = read_shape(tmp_path)
    listed = [tensor for stage in range(layout.pp) for tensor in hf_manifest(shape, layout, stage, torch.float32)]
    expected = made.state_dict()
    if made.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {tensor.name: tensor.shape for tensor in listed} == {key: tuple(v.shape) for key, v in expected.items()}


def test_what_is_exported_is_what_the_manifest_says_in_its_order(tmp_path):
    jobs.make_model(tmp_path, "qwen3")
    for result in ranks.run(jobs.forward_and_export, 4, str(tmp_path), Layout(tp=2, pp=2)):
        if result.weights:
            assert [(key, v.dtype, tuple(v.shape)) for key, v in result.weights.items()] == result.manifest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_written_folder_loads_in_sglang_and_answers_as_transformers_does(tmp_path, family):
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    jobs.make_model(source, family, **sizes | ({} if family == "qwen3" else {"head_dim": 16}))
    ranks.run(jobs.save_folder, 4, str(source), str(target), Layout(tp=2, pp=2), 100_000)
    engine = Engine(
        EngineSettings(
            model=target, load_format="auto", port=free_port(), log_file=tmp_path / "engine.log", device="cpu", dtype="float32",
            api_key="secret", max_total_tokens=2048, max_running_requests=4, weight_version=0,
        )
    )  # fmt: skip
    try:
        engine.start()
        asyncio.run(engine.wait_ready(240))
        answer = asyncio.run(complete(engine, [5, 9, 33], 24))
    finally:
        engine.stop()
    assert answer.tokens.tolist() == greedy(source, [5, 9, 33], 24)


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_load_fails(folder: Path, message: str) -> None:
    with pytest.raises(ranks.RankFailed, match=message):
        ranks.run(jobs.forward_and_export, 1, str(folder), Layout())


def test_a_missing_tensor_is_named(tmp_path):
    jobs.make_model(tmp_path, "qwen2")
    change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.bias"))
    assert_load_fails(tmp_path, r"ModelError.*lacks the tensor 'model\.layers\.2\.self_attn\.k_proj\.bias'")


def test_a_tensor_of_another_shape_is_named(tmp_path):
    jobs.make_model(tmp_path, "qwen2")
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    assert_load_fails(tmp_path, r"ModelError.*'model\.norm\.weight' has shape \(65,\)")


def test_weights_that_are_not_safetensors_are_refused(tmp_path):
    jobs.make_model(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    assert_load_fails(tmp_path, "ModelError.*cannot be read as safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert_load_fails(tmp_path, "ModelError.*convert the model's weights to safetensors")


def test_quantised_weights_are_refused_even_if_config_json_does_not_tell(tmp_path):
    """An FP8 folder: e4m3 values, and their scales beside them."""
    jobs.make_model(tmp_path, "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert_load_fails(tmp_path, rf"ModelError.*'{name}' has the dtype F8_E4M3: these weights are quantised")
    change_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)}))
    change_weights(tmp_path, lambda tensors: tensors.update({f"{name}_scale_inv": torch.ones(1, 1)}))
    assert_load_fails(tmp_path, rf"ModelError.*'{name}_scale_inv' belongs to a model that the trainer does not know")


def test_the_index_says_which_files_hold_the_model(tmp_path):
    """Mistral's folders hold the same weights twice, the second time under names of its own."""
    made = jobs.make_model(tmp_path, "llama")
    names = list(made.state_dict())
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.zeros(64), "model.other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (result,) = ranks.run(jobs.forward_and_export, 1, str(tmp_path), Layout())
    assert all(torch.equal(result.weights[name], values) for name, values in made.state_dict().items())
    (tmp_path / "model.safetensors.index.json").write_text("[")
    assert_load_fails(tmp_path, "ModelError.*index.json is damaged")


def test_the_check_before_a_start_refuses_what_loading_would(tmp_path, capsys):
    jobs.make_model(tmp_path, "qwen2")
    assert accepts.main([str(tmp_path), "--tp=2"]) == 0
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert accepts.main([str(tmp_path)]) == 1
    assert "'model.norm.weight' has the dtype I8: these weights are quantised" in capsys.readouterr().err
