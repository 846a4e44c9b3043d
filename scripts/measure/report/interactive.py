"""Pictures of the HTML page that answer to the mouse: what the panels of an SVG show (figures.carried), drawn
by Bokeh, which is inside the page.

Bokeh is one of the extras (pip install 'tilegpt[html]'): its core is 1.3 MB inside a page, a third of plotly.
Without it, and of pictures that carry no panels, the page has the SVG.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from scripts.measure.report.figures import carried, thousands

DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}
TOOLS = "pan,wheel_zoom,box_zoom,reset,save"


def head() -> str:
    """The scripts that a page with such pictures needs; "" without Bokeh."""
    if find_spec("bokeh") is None:
        return ""
    from bokeh.resources import Resources

    return Resources(mode="inline", components=["bokeh"]).render()


def picture(svg: str) -> str | None:
    """Its panels as HTML, two a line; None for none, or without Bokeh."""
    panels = carried(svg) if find_spec("bokeh") else []
    if not panels:
        return None
    from bokeh.embed import components
    from bokeh.layouts import gridplot

    script, div = components(gridplot([figure(panel) for panel in panels], ncols=2, merge_tools=False))
    return f"{div}{script}"


def figure(panel: dict[str, Any]) -> Any:
    """Lines and marks with their values under the mouse; a click on a name hides its line."""
    from bokeh.models import HoverTool
    from bokeh.plotting import figure as empty

    log_x, log_y = panel["log"]
    kind = {"x_axis_type": "log" if log_x else "linear", "y_axis_type": "log" if log_y else "linear"}
    drawn = empty(title=panel["title"], width=590, height=400, tools=TOOLS, **kind)
    drawn.xaxis.axis_label, drawn.yaxis.axis_label = panel["x"], panel["y"]
    every = sorted({x for *_, points in panel["lines"] for x, _ in points})
    if log_x:
        drawn.xaxis.ticker = every
        drawn.xaxis.major_label_overrides = {x: thousands(x) for x in every}
    for name, colour, style, ends, points in panel["lines"]:
        said = " ".join(name.split()) + (f" ({ends})" if ends else "")
        data = {"x": [x for x, _ in points], "y": [y for _, y in points], "name": [said] * len(points)}
        shown = {"source": data, "color": colour, "legend_label": said}
        drawn.line("x", "y", line_width=2, line_dash=DASHES.get(style, "solid"), **shown)
        drawn.scatter("x", "y", size=6, **shown)
    tips = [("", "@name"), (panel["x"], "@x{0,0.[000]}"), (panel["y"], "@y{0,0.[000]}")]
    drawn.add_tools(HoverTool(tooltips=tips, mode="mouse"))
    drawn.legend.click_policy, drawn.legend.label_text_font_size = "hide", "8pt"
    drawn.legend.spacing = 0
    drawn.add_layout(drawn.legend[0], "right")
    return drawn
