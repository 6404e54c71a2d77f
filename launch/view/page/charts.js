// Charts with uPlot: one line per series, or stacked areas. The legend shows the values at the pointer.

import { element, figure } from "./dom.js";

const HEIGHT = 220;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const seriesColour = (index) => colour(`--series-${index % 7}`);

export function chart(holder, data) {
  const shown = data.stacked ? stacked(data.lines) : data.lines.map((line) => ({ ...line, drawn: line.values }));
  const series = shown.map((line, index) => ({
    label: line.name,
    stroke: seriesColour(index),
    width: 2,
    fill: data.stacked ? seriesColour(index) : undefined,
    spanGaps: true,
    points: { show: data.steps.length < 30 && !data.stacked, size: 5 },
    value: (_plot, _drawn, _series, at) => figure(at === null ? last(line.values) : line.values[at]),
  }));
  const order = data.stacked ? [...series.keys()].reverse() : [...series.keys()];
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--rule") }, ticks: { stroke: colour("--rule") } };
  const plot = element("div", { class: "plot" });
  holder.append(plot);
  const made = new window.uPlot(
    {
      width: width(holder),
      height: HEIGHT,
      scales: { x: { time: false }, y: { distr: data.log ? 3 : 1, range: data.log ? undefined : fromZero } },
      axes: [axis, { ...axis, size: 64, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }],
      series: [{ label: "step" }, ...order.map((index) => series[index])],
      cursor: { drag: { x: true, y: false } },
    },
    [data.steps, ...order.map((index) => positive(shown[index].drawn, data.log))],
    plot,
  );
  new ResizeObserver(() => made.setSize({ width: width(holder), height: HEIGHT })).observe(holder);
}

const width = (holder) => Math.max(200, holder.clientWidth - 8);
const last = (values) => values.findLast((value) => value !== null);
const fromZero = (_plot, low, high) => window.uPlot.rangeNum(Math.min(low ?? 0, 0), Math.max(high ?? 1, 1e-9), 0.05, true);
const positive = (values, log) => (log ? values.map((value) => (value > 0 ? value : null)) : values);

function stacked(lines) {
  const below = lines.length ? lines[0].values.map(() => 0) : [];
  return lines.map((line) => ({ ...line, drawn: line.values.map((value, at) => (below[at] += value ?? 0)) }));
}
