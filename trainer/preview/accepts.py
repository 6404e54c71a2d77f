"""Whether the trainer takes a model folder, without reading weights or starting ranks.

    python -m trainer.preview.accepts FOLDER [--tp N] [--pp N] [--cp N] [--vpp N]

It imports what the trainer imports, so it also shows that this environment can. Exit code 1 and one line where it cannot be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from conf.shapes import Layout, ModelError, ModelShape, check_layout, read_shape
from trainer.megatron.families import placements


def missing_or_misshapen(folder: Path, shape: ModelShape, layout: Layout) -> list[str]:
    """The tensors that the trainer will look for and not find as they should be."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    faults = []
    for stage in range(layout.pp):
        for placed in placements(shape, layout, stage):
            for piece in placed.pieces:
                wanted, found = piece.sizes(shape), shapes.get(piece.name)
                if found != wanted:
                    faults.append(f"{piece.name} is {list(found) if found else 'missing'}, not {list(wanted)}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer.preview.accepts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    for size in ("tp", "pp", "cp", "vpp"):
        parser.add_argument(f"--{size}", type=int, default=1)
    options = parser.parse_args(arguments)
    import megatron.core  # what the environment must hold

    try:
        shape, layout = read_shape(options.folder), Layout(tp=options.tp, pp=options.pp, cp=options.cp, vpp=options.vpp)
        check_layout(shape, layout)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    if faults := missing_or_misshapen(options.folder, shape, layout):
        print(f"{options.folder}: {faults[0]}; {len(faults)} tensor(s) are not as config.json says", file=sys.stderr)
        return 1
    print(f"{shape.architecture}, {shape.layers} layers of {shape.hidden}; megatron-core {megatron.core.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
