"""Programs that are not ours, each started with a fault mended that it has here: torchrun and SGLang's server."""
