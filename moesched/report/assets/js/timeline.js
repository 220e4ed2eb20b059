// The timeline: what it shows, what is selected, and when it is drawn.

import { drawSelected } from "./arrows.js";
import { Charts } from "./charts.js";
import { describe, describeCancelled, describeIdle, stepName } from "./describe.js";
import { showDetails, showTooltip } from "./details.js";
import { listenToKeys, listenToPointer } from "./input.js";
import { Painter } from "./paint.js";
import { AXIS, rowAt, rowsOf } from "./rows.js";
import { firstAfter, sliceAt } from "./run.js";
import { colours } from "./theme.js";
import { duration, moment } from "./units.js";
import { firstView, Viewport } from "./viewport.js";

const SLACK = 4;
const MOST_OF_WINDOW = 0.62;

export class Timeline {
  /** `parts` are the elements: lanes, canvas, spacer, details, tooltip, charts and pathButton. */
  constructor(runs, families, parts) {
    this.runs = runs;
    this.parts = parts;
    for (const run of runs) {
      const { shift, steps } = run.data;
      run.steps = steps.map(({ step, start, end }) => ({
        step,
        start: start + shift,
        end: end + shift,
        name: stepName(step),
        short: step > 0 ? String(step) : "",
      }));
    }
    this.context = parts.canvas.getContext("2d", { alpha: false });
    this.painter = new Painter(this.context, families);
    const start = Math.min(...runs.map((run) => run.start));
    const end = Math.max(...runs.map((run) => run.end));
    this.view = new Viewport(start, end, () => this.draw());
    const [first, last] = firstView(runs);
    if (first > start) this.view.show(first - 0.01 * (last - first), last + 0.01 * (last - first));
    this.showPath = true;
    this.selected = null;
    this.cursor = null;
    this.charts = new Charts(parts.charts, runs, this.view, (over) => listenToPointer(over, this, () => 0, true));
    this.#layOut();
    listenToKeys(parts.lanes, this);
    listenToPointer(parts.canvas, this, () => this.gutter);
    parts.lanes.addEventListener("scroll", () => this.draw());
    addEventListener("resize", () => this.resize());
    new ResizeObserver(() => this.resize()).observe(parts.lanes);
  }

  /** Fit the canvas to its element and the charts to the canvas. */
  resize() {
    const { lanes, canvas, spacer, charts } = this.parts;
    const width = lanes.clientWidth;
    const height = Math.min(AXIS + this.height + 4, Math.floor(innerHeight * MOST_OF_WINDOW));
    const size = `${width} ${height} ${devicePixelRatio} ${this.height}`;
    if (size === this.size || !width) return;
    this.size = size;
    this.gutter = parseInt(getComputedStyle(document.documentElement).getPropertyValue("--gutter"), 10);
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    canvas.style.height = `${height}px`;
    spacer.style.height = `${AXIS + this.height + 4 - height}px`;
    this.width = width;
    this.canvasHeight = height;
    this.recolour();
    charts.style.width = `${width + 2}px`;
  }

  /** Draw in the colours of the present theme. */
  recolour() {
    this.colours = colours();
    this.painter.recolour(this.colours);
    if (this.width) this.charts.resize(this.width, this.gutter, this.colours);
    this.draw();
  }

  /** Draw in the next frame. */
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      if (this.width) this.#paint();
    });
  }

  zoom(factor) {
    const middle = this.selected ? this.#middleOfSelected() : 0.5;
    this.view.zoom(factor, middle);
  }

  togglePath() {
    this.showPath = !this.showPath;
    this.parts.pathButton.setAttribute("aria-pressed", String(this.showPath));
    this.#layOut();
    this.size = "";
    this.resize();
  }

  /** Select a task, given as {run, index}, or none. */
  select(selected, reveal = true) {
    this.selected = selected;
    if (selected && reveal) this.#reveal(selected);
    showDetails(this.parts.details, selected, (each) => this.select(each));
    this.draw();
  }

  /** Select the next or the previous task of the lane. */
  selectNext(direction) {
    if (!this.selected) return this.#selectFirst();
    const { run, index } = this.selected;
    const { order } = run.laneOf(index).slices;
    const next = order[order.indexOf(index) + direction];
    if (next !== undefined) this.select({ run, index: next });
  }

  /** Select what runs at the same time on the next or the previous lane that has tasks. */
  selectLane(direction) {
    if (!this.selected) return this.#selectFirst();
    const lanes = this.rows.filter((row) => row.kind === "lane" && row.slices.order.length);
    const { run, index } = this.selected;
    const place = lanes.findIndex((row) => row.run === run && row.lane === run.laneOf(index));
    const row = lanes[place + direction];
    if (!row) return;
    const at = Math.min(firstAfter(row.slices, run.starts[index]), row.slices.order.length - 1);
    this.select({ run: row.run, index: row.slices.order[at] });
  }

  zoomToSelected() {
    if (!this.selected) return;
    const { run, index } = this.selected;
    const around = 3 * (run.ends[index] - run.starts[index]);
    this.view.show(run.starts[index] - around, run.ends[index] + around);
  }

  drag(x, y) {
    this.dragged(true);
    this.view.pan(-x / (this.width - this.gutter));
    this.parts.lanes.scrollTop -= y;
  }

  dragged(now) {
    this.parts.lanes.classList.toggle("dragged", now);
  }

  /** Show what is under the pointer; null where it left. */
  hover(event, element) {
    const time = event && this.#time(event, element);
    this.cursor = time === null || time < this.view.start ? null : time;
    this.charts.point(this.cursor);
    const told = event && element === this.parts.canvas && this.cursor !== null ? this.#under(event) : null;
    showTooltip(this.parts.tooltip, event && { x: event.clientX, y: event.clientY }, told?.heading, told?.pairs);
    this.draw();
  }

  click(event, element) {
    if (element !== this.parts.canvas) return;
    const found = this.#find(event);
    this.select(found && found.index >= 0 ? { run: found.row.run, index: found.index } : null, false);
  }

  #layOut() {
    Object.assign(this, rowsOf(this.runs, this.showPath));
  }

  #paint() {
    const { canvas, lanes } = this.parts;
    this.context.setTransform(canvas.width / this.width, 0, 0, canvas.height / this.canvasHeight, 0, 0);
    this.painter.paint({
      rows: this.rows,
      view: this.view,
      width: this.width,
      height: this.canvasHeight,
      gutter: this.gutter,
      scroll: lanes.scrollTop,
      colours: this.colours,
      showPath: this.showPath,
    });
    this.#paintOver();
    this.charts.update();
    if (!this.drawn) {
      this.drawn = true;
      requestAnimationFrame(() => performance.mark("timeline drawn")); // once the first frame is on the screen
    }
  }

  #paintOver() {
    const { context, painter } = this;
    context.save();
    context.beginPath();
    context.rect(this.gutter, AXIS, this.width - this.gutter, this.canvasHeight - AXIS);
    context.clip();
    if (this.cursor !== null) {
      context.fillStyle = this.colours.quiet;
      context.fillRect(Math.round(painter.x(this.cursor)), AXIS, 1, this.canvasHeight);
    }
    if (this.selected) {
      const { run, index } = this.selected;
      drawSelected(context, run, index, (each) => this.#place(run, each), this.colours);
    }
    context.restore();
  }

  /** The pixels of a slice on its lane. */
  #place(run, index) {
    const row = this.rows.find((each) => each.kind === "lane" && each.run === run && each.lane === run.laneOf(index));
    const top = this.painter.top(row) + 2;
    return {
      left: this.painter.x(run.starts[index]),
      right: this.painter.x(run.ends[index]),
      top,
      bottom: top + row.height - 5,
    };
  }

  #time(event, element) {
    const box = element.getBoundingClientRect();
    const offset = element === this.parts.canvas ? this.gutter : 0;
    return this.view.start + ((event.clientX - box.left - offset) / (box.width - offset)) * this.view.span;
  }

  /** The row, the time and the slice under the pointer; null if there is no row with slices. */
  #find(event) {
    const { canvas, lanes } = this.parts;
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const row = y < AXIS ? null : rowAt(this.rows, y - AXIS + lanes.scrollTop);
    const time = this.#time(event, canvas);
    if (!row || time < this.view.start) return null;
    if (!row.slices) return { row, time, index: -1 };
    const place = sliceAt(row.slices, time, this.#slack());
    return { row, time, index: place < 0 ? -1 : row.slices.order[place] };
  }

  /** The time of a few pixels. */
  #slack() {
    return (SLACK * this.view.span) / (this.width - this.gutter);
  }

  #under(event) {
    const found = this.#find(event);
    if (!found) return null;
    const { row, time, index } = found;
    if (row.kind === "steps") return this.#step(row, time);
    if (!row.slices) return null;
    if (row.lane) {
      const place = row.run.cancelledAt(row.lane, time, this.#slack());
      if (place >= 0) return { heading: row.run.labelOfCancelled(place), pairs: describeCancelled(row.run, place) };
    }
    if (index >= 0) return { heading: row.run.label(index), pairs: describe(row.run, index) };
    const next = firstAfter(row.slices, time);
    if (row.kind !== "lane" || next >= row.slices.order.length) return null;
    const since = next > 0 ? row.slices.ends[next - 1] : row.run.start;
    return { heading: "", pairs: describeIdle(row.run, row.lane, row.slices.order[next], since) };
  }

  #step(row, time) {
    const step = row.run.steps.find((each) => time >= each.start && time < each.end);
    if (!step) return null;
    const took = step.end - step.start;
    return { heading: step.name, pairs: [["starts", moment(step.start, took)], ["takes", duration(took)]] };
  }

  #selectFirst() {
    const row = this.rows.find((each) => each.kind === "lane" && each.slices.order.length);
    const place = Math.min(firstAfter(row.slices, this.view.start), row.slices.order.length - 1);
    this.select({ run: row.run, index: row.slices.order[place] });
  }

  #reveal({ run, index }) {
    this.view.reveal(run.starts[index], run.ends[index]);
    const row = this.rows.find((each) => each.kind === "lane" && each.run === run && each.lane === run.laneOf(index));
    const { lanes } = this.parts;
    const room = this.canvasHeight - AXIS - row.height;
    lanes.scrollTop = Math.min(Math.max(lanes.scrollTop, row.y - room), row.y);
  }

  #middleOfSelected() {
    const { run, index } = this.selected;
    const middle = ((run.starts[index] + run.ends[index]) / 2 - this.view.start) / this.view.span;
    return middle >= 0 && middle <= 1 ? middle : 0.5;
  }
}
