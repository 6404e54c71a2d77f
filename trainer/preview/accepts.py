"""Checks whether the trainer accepts a model folder, without reading weights or starting ranks.

    python -m trainer.preview.accepts FOLDER [--tp N] [--pp N] [--cp N] [--vpp N]

It also checks that this environment has the packages of the trainer. It refuses a folder with one line and exit code 1.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from conf.shapes import Layout, ModelError, check_layout, read_shape
from trainer.megatron.hf_weights import open_tensors, tensor_faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer.preview.accepts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    for size in ("tp", "pp", "cp", "vpp"):
        parser.add_argument(f"--{size}", type=int, default=1)
    options = parser.parse_args(arguments)
    import megatron.core  # fails if the environment lacks it

    try:
        shape, layout = read_shape(options.folder), Layout(tp=options.tp, pp=options.pp, cp=options.cp, vpp=options.vpp)
        check_layout(shape, layout)
        with ExitStack() as stack:
            faults = tensor_faults(open_tensors(options.folder, stack), shape)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    if faults:
        print(f"{options.folder}: {faults[0]}; {len(faults)} tensor(s) do not match config.json", file=sys.stderr)
        return 1
    print(f"{shape.architecture}, {shape.layers} layers of {shape.hidden}; megatron-core {megatron.core.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
