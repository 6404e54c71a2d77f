"""Stand-in for torchvision, on the engine's PYTHONPATH only when the engine runs on CPU.

Cause: SGLang's image code imports torchvision while the server starts, whatever the model, and transformers then
takes it for installed and imports a few names of its own. A text model calls none of them, and the real package is
bound to one torch build. Every name here imports; calling one raises.

Remove when: SGLang imports torchvision only for models that take images.
"""

from typing import NoReturn

__version__ = "0.0.0+cpu.standin"


def not_here(name: str) -> type:
    """A class that stands for `name` in imports and annotations, and raises when it is called."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"torchvision's {name} is not in the CPU stand-in, which serves text models only")

    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__new__": refuse})
