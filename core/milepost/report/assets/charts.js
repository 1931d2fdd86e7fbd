"use strict";
// Charts: a thin layer over uPlot that takes colours from the style sheet and draws anew when they change.

const charts = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function lineColor(number) {
  return color(`--c${number % 8}`);
}

function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function axis(extra) {
  return {
    stroke: color("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false },
    grid: { stroke: color("--grid"), width: 1 }, ...extra,
  };
}

// Wide enough for the longest label that an axis shows.
function labelWidth(_, values) {
  const longest = Math.max(0, ...(values || []).map((text) => String(text).length));
  return 14 + 6.4 * longest;
}

function axes(xLabel) {
  const whole = (_, splits) => splits.map((x) => (Number.isInteger(x) ? String(x) : ""));
  return [
    axis({ values: whole, size: 24, gap: 4, space: 46 }),
    axis({ values: (_, splits) => splits.map(shortNumber), size: labelWidth, gap: 4, space: 34 }),
  ];
}

// The legend shows the values under the pointer, and the last ones where there is no pointer.
function xSeries(label, x) {
  return { label, value: (_, at) => String(at ?? x[x.length - 1]) };
}

// Draws with `make`, which returns the options without a size and the data, whenever size or colours change.
function mount(place, height, make) {
  const chart = { place, height, make, plot: null };
  charts.push(chart);
  draw(chart);
  new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width > 0 && chart.plot && width !== chart.plot.width) chart.plot.setSize({ width, height });
    else if (width > 0 && !chart.plot) draw(chart);
  }).observe(place);
}

function draw(chart) {
  const width = chart.place.clientWidth;
  if (width === 0) return;
  if (chart.plot) chart.plot.destroy();
  const { options, data } = chart.make();
  chart.plot = new uPlot({ width, height: chart.height, ...options }, data, chart.place);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));

function lineChart(place, spec, syncKey) {
  const tables = spec.lines.map((line) => [line.x, line.y, ...(line.low ? [line.low, line.high] : [])]);
  const data = uPlot.join(tables);
  mount(place, 190, () => {
    const series = [xSeries(spec.axis, data[0])];
    const bands = [];
    for (const line of spec.lines) {
      const stroke = lineColor(line.color);
      const sparse = line.x.length <= 40;
      series.push({
        label: line.label, stroke, width: 1.75, spanGaps: true, points: { show: sparse, size: 5, fill: stroke },
        value: (_, y, s, at) => shortNumber(at === null || at === undefined ? line.y[line.y.length - 1] : y), ...(line.dash ? { dash: [5, 4] } : {}),
      });
      if (line.low) {
        const edge = { isEdge: true, stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, value: () => "" };
        bands.push({ series: [series.length + 1, series.length], fill: stroke + "2e" });
        series.push({ ...edge, label: "low" }, { ...edge, label: "high" });
      }
    }
    const options = {
      series, bands, axes: axes(spec.axis), scales: { x: { time: false }, y: { range: padded } },
      padding: [8, 8, 0, 0], cursor: { sync: { key: syncKey }, points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true }, hooks: { init: [hideEdges] },
    };
    return { options, data };
  });
}

// Low and high of a band are drawn, but are no entries of the legend.
function hideEdges(plot) {
  plot.root.querySelectorAll(".u-legend tr").forEach((row, i) => {
    if (plot.series[i].isEdge) row.style.display = "none";
  });
}

function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const margin = (high - low) * 0.08;
  // A quantity that is never negative is not drawn as if it could be.
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

function stackedBars(place, spec) {
  const sums = [];
  spec.parts.forEach((part, i) => sums.push(part.y.map((y, j) => (y || 0) + (i ? sums[i - 1][j] : 0))));
  // The tallest sum is drawn first, and what is below it over it.
  const order = spec.parts.map((_, i) => i).reverse();
  const data = [spec.x, ...order.map((i) => sums[i])];
  mount(place, 230, () => {
    const paths = uPlot.paths.bars({ size: [0.86, 46] });
    const last = spec.x.length - 1;
    const series = [xSeries("rollout", spec.x), ...order.map((i) => ({
      label: spec.parts[i].name, stroke: lineColor(i), fill: lineColor(i), width: 0, paths, points: { show: false },
      value: (_, y, s, at) => shortNumber(spec.parts[i].y[at ?? last]) + " s",
    }))];
    const options = {
      series, axes: axes("rollout"),
      scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: (_, low, high) => [0, (high || 1) * 1.05] } },
      padding: [8, 8, 0, 0], cursor: { points: { show: false }, drag: { x: true, y: false } }, legend: { live: true },
    };
    return { options, data };
  });
}
