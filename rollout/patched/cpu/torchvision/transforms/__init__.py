"""Part of the torchvision stand-in: any name imports, none can be called. The enum keys tables built at import."""

import enum

from torchvision import not_here as __getattr__  # noqa: F401


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
