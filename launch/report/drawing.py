"""A picture of lines, dots, boxes and text, rendered as SVG for a page or as PNG. It needs no plotting library.

Coordinates are pixels from the upper left corner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SMOOTHING = 2  # a PNG is drawn larger by this factor and then shrunk
FONT_SIZE = 12
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # anchors on a text's baseline: SVG's name -> Pillow's


@dataclass(frozen=True, slots=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    colour: str
    radius: float = 3.0
    hint: str = ""  # shown by a browser when the pointer is on it


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # the baseline
    words: str
    anchor: str = "start"  # start | middle | end
    colour: str = "#222222"
    size: int = FONT_SIZE
    bold: bool = False


Shape = Line | Dot | Box | Text


@dataclass(frozen=True, slots=True)
class Drawing:
    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)

    def svg(self) -> str:
        inner = "".join(map(_svg, self.shapes))
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img">{inner}</svg>'
        )

    def image(self, scale: float = 1.0) -> Image.Image:
        large = scale * SMOOTHING
        image = Image.new("RGB", (round(self.width * large), round(self.height * large)), "white")
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            _paint(pen, shape, large)
        return image.resize((round(self.width * scale), round(self.height * scale)), Image.Resampling.LANCZOS)


def text_width(words: str, size: int = FONT_SIZE) -> float:
    return ImageFont.load_default(size).getlength(words)


def write_sheet(drawings: Sequence[Drawing], columns: int, path: Path, *, title: str = "", scale: float = 2.0) -> None:
    """All drawings in one PNG, row by row, under a title."""
    width, height = max(d.width for d in drawings), max(d.height for d in drawings)
    margin, head = 16, 44 if title else 16
    rows = -(-len(drawings) // columns)
    frame = Drawing(2 * margin + columns * width, head + margin + rows * height)
    if title:
        frame.add(Text(margin + 8, 30, title, size=17, bold=True))
    sheet = frame.image(scale)
    for i, drawing in enumerate(drawings):
        row, column = divmod(i, columns)
        sheet.paste(drawing.image(scale), (round((margin + column * width) * scale), round((head + row * height) * scale)))
    sheet.save(path)


def _svg(shape: Shape) -> str:
    match shape:
        case Line(points=points, colour=colour, width=width):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        case Dot(x=x, y=y, colour=colour, radius=radius, hint=hint):
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{_title(hint)}</circle>'
        case Box(x=x, y=y, width=width, height=height, colour=colour, hint=hint):
            place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            return f'<rect {place} fill="{colour}">{_title(hint)}</rect>'
        case Text(x=x, y=y, words=words, anchor=anchor, colour=colour, size=size, bold=bold):
            weight = ' font-weight="bold"' if bold else ""
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
            return f'<text {place} fill="{colour}"{weight}>{escape(words)}</text>'


def _title(hint: str) -> str:
    return f"<title>{escape(hint)}</title>" if hint else ""


def _paint(pen: ImageDraw.ImageDraw, shape: Shape, scale: float) -> None:
    match shape:
        case Line(points=points, colour=colour, width=width):
            at = [(x * scale, y * scale) for x, y in points]
            pen.line(at, fill=colour, width=max(1, round(width * scale)), joint="curve")
        case Dot(x=x, y=y, colour=colour, radius=radius):
            pen.ellipse([(x - radius) * scale, (y - radius) * scale, (x + radius) * scale, (y + radius) * scale], fill=colour)
        case Box(x=x, y=y, width=width, height=height, colour=colour):
            pen.rectangle([x * scale, y * scale, (x + width) * scale, (y + height) * scale], fill=colour)
        case Text(x=x, y=y, words=words, anchor=anchor, colour=colour, size=size, bold=bold):
            font = ImageFont.load_default(round(size * scale))
            thick = round(0.02 * size * scale) if bold else 0
            pen.text((x * scale, y * scale), words, fill=colour, font=font, anchor=ANCHORS[anchor], stroke_width=thick)
