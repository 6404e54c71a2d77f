"""Part of the torchvision stand-in: any name imports, none can be called."""

from torchvision import not_here as __getattr__  # noqa: F401
