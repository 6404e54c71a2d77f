"""Whether our reader and writer of Hugging Face folders agree with an independent one, mbridge, weight for weight.

    .venv/bin/python benchmarks/readers.py [--families qwen3 llama …]

For each family and layout a tiny random model goes through ours: read from its folder, written to another folder. Then mbridge
reads both folders into the same Megatron modules, and what it puts there is compared with what we put there. mbridge and einops
are fetched with pip into a temporary folder. mbridge names the norms as Transformer Engine does, so our names are translated for
it; it has no Mistral. Ends with 1 where a weight differs.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trainer  # noqa: F401 (before megatron)
from conf.shapes import Layout
from tests.trainer import jobs, ranks

PACKAGES = ("mbridge==0.15.1", "einops==0.8.2")
LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(tp=2),
    "PP2": Layout(pp=2),
    "TP2 PP2": Layout(tp=2, pp=2, sequence_parallel=True),
    "PP2 VPP2": Layout(pp=2, vpp=2),
    "TP4": Layout(tp=4),
}
THEIR_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def compare(packages: str, source: str, written: str, layout: Layout) -> tuple[int, int, float]:
    """On one rank: (parameters compared, of these different, largest difference), over both folders."""
    import torch

    from conf.shapes import read_shape
    from trainer import process_groups
    from trainer.megatron import hf_weights, model

    sys.path.append(packages)
    from mbridge import AutoBridge

    mesh = process_groups.initialize(layout, seed=1, timeout_s=120)
    shape = read_shape(source)
    chunks = model.build(shape, mesh, dtype=torch.float32)
    hf_weights.load(chunks, shape, mesh, source)
    hf_weights.save(chunks, shape, mesh, written, description=source)
    ours = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    bridge = AutoBridge.from_pretrained(source, dtype=torch.float32)
    theirs_of = bridge._weight_name_mapping_mcore_to_hf

    def translated(name: str) -> list[str]:
        for our_name, their_name in THEIR_NAMES.items():
            name = name.replace(our_name, their_name)
        return theirs_of(name)

    bridge._weight_name_mapping_mcore_to_hf = translated
    compared, different, largest = 0, 0, 0.0
    for folder in (source, written):
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(torch.nan)
            bridge.load_weights(chunks, folder)
        for own, parameter in zip(ours, (p for chunk in chunks for p in chunk.parameters()), strict=True):
            compared += 1
            if not torch.equal(own, parameter):
                different += 1
                largest = max(largest, (own - parameter).abs().nan_to_num(torch.inf).max().item())
    process_groups.shutdown()
    return compared, different, largest


def main() -> int:
    families = [name for name in jobs.FAMILIES if name != "mistral"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=families, default=families)
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        packages = Path(temporary) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(packages), *PACKAGES]
        subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
        for family in options.families:
            folder = Path(temporary) / family
            jobs.make_model(folder, family, vocab_size=256)
            for name, layout in LAYOUTS.items():
                written = Path(temporary) / f"{family} {name}"
                results = ranks.run(compare, layout.ranks_per_replica, str(packages), str(folder), str(written), layout)
                compared, different, largest = (
                    sum(r[0] for r in results),
                    sum(r[1] for r in results),
                    max(r[2] for r in results),
                )
                wrong += different
                print(
                    f"{family:12} {name:9} {compared:5} parameters on all ranks, {different} differ, by {largest:g}", flush=True
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
