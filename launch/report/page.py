"""An HTML page of text and charts that loads nothing from elsewhere; the planner, the simulator and the reports share it."""

import html
from collections.abc import Iterable, Sequence

from launch.report.drawing import Drawing

STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2rem; color: #1e293b; background: #fff }
h1 { font-size: 1.3rem } p { max-width: 60rem }
main { display: grid; gap: 1.2rem; margin-top: 1.5rem }
figure { margin: 0; border: 1px solid #e2e8f0; border-radius: 8px; padding: .7rem } svg { width: 100%; height: auto }
pre { background: #f1f5f9; border-radius: 8px; padding: .9rem; overflow-x: auto; font-size: 12.5px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .bad { color: #b91c1c }
th, td { padding: .25rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e2e8f0 }
"""


def html_page(title: str, above: Iterable[str], figures: Sequence[Drawing]) -> str:
    """A heading, blocks of HTML, and the charts in as many columns as fit into the window."""
    drawn = "\n".join(f"<figure>{figure.svg()}</figure>" for figure in figures)
    widest = max((figure.width for figure in figures), default=0)
    columns = f"grid-template-columns: repeat(auto-fill, minmax(min(100%, {widest}px), 1fr))"
    blocks = "\n".join(block for block in above if block)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>
<style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
{blocks}
<main style="{columns}">
{drawn}
</main></html>
"""


def pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
