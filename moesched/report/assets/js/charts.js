// Curves of memories and pools, drawn by uPlot, on the time axis of the lanes.

import { make, swatch } from "./dom.js";
import { amount, moment, whole } from "./units.js";

const HEIGHT = 84;
const COLOURS = ["#2E8BC9", "#D55E00", "#009E73"];
const KINDS = [
  { key: "memory", title: "memory ", unit: (value) => amount(value, "B"), curves: [["reserved", "reserved"], ["pages", "pages"]] },
  { key: "pools", title: "", unit: whole, curves: [["hits", "hits"], ["misses", "misses"], ["wasted", "wasted"]] },
];

export class Charts {
  /** `attach` is called with the element of each chart that takes the pointer. */
  constructor(parent, runs, view, attach) {
    this.view = view;
    this.charts = [];
    this.visible = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const chart = this.charts.find((each) => each.element === target);
        chart.inView = isIntersecting;
        if (isIntersecting) this.#show(chart);
      }
    });
    for (const run of runs) {
      for (const kind of KINDS) for (const data of run.data[kind.key]) this.#add(parent, run, kind, data, attach);
    }
  }

  /** Draw the charts anew, in another size or in other colours; those out of view once they come into view. */
  resize(width, gutter, colours) {
    this.size = { width, gutter, colours };
    for (const chart of this.charts) {
      chart.plot?.destroy();
      chart.plot = null;
      if (chart.inView) this.#show(chart);
      else this.visible.observe(chart.element);
    }
  }

  /** Show the part of the time that the viewport shows. */
  update() {
    for (const chart of this.charts) if (chart.inView) this.#show(chart);
  }

  /** Show the values at a time; at the end if it is null. */
  point(time) {
    for (const chart of this.charts) if (chart.inView) this.#values(chart, time);
  }

  /** The element of the first chart of a pool or a memory; undefined if there is none. */
  named(name) {
    return name ? this.charts.find((chart) => chart.name === name)?.element : undefined;
  }

  /** The curve under the pointer at a time, as a heading and pairs; null if there is none. */
  under(over, time) {
    const chart = this.charts.find((each) => each.plot?.over === over);
    const at = chart ? lastUpTo(chart.times, time) : -1;
    if (at < 0) return null;
    const values = chart.values.map(({ name }, number) => [name, chart.kind.unit(chart.curves[number][at])]);
    return { heading: chart.title, pairs: [["at", moment(time, this.view.span / 100)], ...values] };
  }

  #add(parent, run, kind, data, attach) {
    const shift = run.data.shift;
    const times = data.time.map((time) => time + shift);
    const curves = kind.curves.map(([key]) => data[key]);
    const where = run.ranks > 1 ? `rank ${data.rank} ${data.name}` : data.name;
    const names = make("div", "", make("strong", kind.title + where));
    if (run.data.title) names.append(make("em", run.data.title));
    names.className = "names";
    const values = kind.curves.map(([, name], number) => {
      const value = make("div", "", swatch(COLOURS[number]), make("span", name));
      names.append(value);
      return { name, element: value.lastChild };
    });
    const element = make("div", "", names);
    element.className = "chart";
    parent.append(element);
    const chart = { name: data.name, title: kind.title + where, element, kind, times, curves, values, attach, plot: null, inView: false, shown: null };
    this.charts.push(chart);
    this.#values(chart, null);
  }

  #plot(chart) {
    const { width, gutter, colours } = this.size;
    const most = chart.curves.reduce((least, curve) => curve.reduce((a, b) => Math.max(a, b), least), 1);
    const stepped = uPlot.paths.stepped({ align: 1 });
    const grid = { stroke: colours.line, width: 1 };
    const plot = new uPlot(
      {
        width,
        height: HEIGHT,
        padding: [10, 0, 6, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        scales: { x: { time: false, auto: false, min: this.view.start, max: this.view.end }, y: { range: [0, most * 1.08] } },
        axes: [
          { show: false },
          {
            size: gutter,
            gap: 6,
            stroke: colours.quiet,
            font: "11px system-ui, sans-serif",
            grid,
            ticks: { show: false },
            space: 26,
            values: (_, ticks) => ticks.map((tick) => (tick ? chart.kind.unit(tick) : "0")),
          },
        ],
        series: [
          {},
          ...chart.curves.map((_, number) => ({
            stroke: COLOURS[number],
            width: 1.5,
            paths: stepped,
            points: { show: false },
            fill: chart.kind.key === "memory" && number === 1 ? `${COLOURS[number]}33` : undefined,
          })),
        ],
      },
      [chart.times, ...chart.curves],
      chart.element,
    );
    chart.attach(plot.over);
    return plot;
  }

  #show(chart) {
    const shown = `${this.view.start} ${this.view.end}`;
    if (!chart.plot) chart.plot = this.#plot(chart);
    else if (chart.shown !== shown) chart.plot.setScale("x", { min: this.view.start, max: this.view.end });
    chart.shown = shown;
  }

  #values(chart, time) {
    const at = time === null ? chart.times.length - 1 : lastUpTo(chart.times, time);
    chart.values.forEach(({ name, element }, number) => {
      element.textContent = at < 0 ? name : `${name} ${chart.kind.unit(chart.curves[number][at])}`;
    });
    if (chart.plot && time !== null) chart.plot.setCursor({ left: chart.plot.valToPos(time, "x"), top: 10 }, false);
    else chart.plot?.setCursor({ left: -10, top: -10 }, false);
  }
}

/** The place of the last time that is not later; -1 if all are. */
export function lastUpTo(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
