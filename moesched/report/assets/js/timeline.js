// The timeline: what it shows, what is selected, and when it is drawn.

import { drawSelected } from "./arrows.js";
import { Charts } from "./charts.js";
import { stepName } from "./describe.js";
import { showDetails, showRange, showTooltip } from "./details.js";
import { Finder } from "./finder.js";
import { listenToFinder, listenToKeys, listenToPointer } from "./input.js";
import { drawRange } from "./marks.js";
import { Painter } from "./paint.js";
import { describePicked, pick } from "./pick.js";
import { AXIS, BELOW, rowsOf } from "./rows.js";
import { firstAfter } from "./run.js";
import { colours } from "./theme.js";
import { whole } from "./units.js";
import { firstView, Viewport } from "./viewport.js";

const SLACK = 4;
const GUTTER = 200;
const NARROW = 1000;
const GUTTER_SHARE = 0.2;

export class Timeline {
  /** `parts` are the elements: lanes, canvas, spacer, details, tooltip, charts, pathButton, find and found. */
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
    this.range = null;
    this.finder = new Finder(runs);
    this.charts = new Charts(parts.charts, runs, this.view, (over) => listenToPointer(over, this, () => 0, true));
    this.#layOut();
    listenToKeys(parts.lanes, this);
    listenToFinder(parts.find, parts.lanes, this);
    listenToPointer(parts.canvas, this, () => this.gutter);
    parts.lanes.addEventListener("scroll", () => this.draw());
    addEventListener("resize", () => this.resize());
    new ResizeObserver(() => this.resize()).observe(parts.lanes);
  }

  /** Fit the canvas to its element and the charts to the canvas. */
  resize() {
    const { lanes, canvas, spacer, charts } = this.parts;
    const { style } = document.documentElement;
    style.setProperty("--lanes", `${AXIS + this.height + BELOW}px`);
    const width = lanes.clientWidth;
    const height = lanes.clientHeight;
    const size = `${width} ${height} ${devicePixelRatio} ${this.height}`;
    if (size === this.size || !width) return;
    this.size = size;
    this.gutter = width < NARROW ? Math.round(width * GUTTER_SHARE) : GUTTER;
    style.setProperty("--gutter", `${this.gutter}px`);
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    canvas.style.height = `${height}px`;
    spacer.style.height = `${Math.max(0, AXIS + this.height + BELOW - height)}px`;
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
    this.range = null;
    if (selected && reveal) this.#reveal(selected);
    showDetails(this.parts.details, selected, (each) => this.select(each));
    this.draw();
  }

  /** Leave the range or the task that is shown. */
  leave() {
    this.select(null);
  }

  /** Mark the tasks that a text finds, and tell how many these are. */
  find(text) {
    this.finder.search(text);
    this.parts.found.value = text.trim() ? `${whole(this.finder.places.length)} found` : "";
    this.draw();
  }

  /** Select the next or the previous task that was found. */
  findNext(direction) {
    const next = this.finder.next(this.selected, direction);
    if (next) this.select(next);
  }

  /** Begin a range if the pointer is on the time axis, or with Shift; returns whether it did. */
  beginRange(event, element) {
    const { canvas } = this.parts;
    const onAxis = element === canvas && event.clientY - canvas.getBoundingClientRect().top < AXIS;
    if (!onAxis && !event.shiftKey) return false;
    this.rangeFrom = this.#time(event, element);
    return true;
  }

  /** Show the range from where it began to the pointer. */
  extendRange(event, element) {
    const [from, to] = [this.rangeFrom, this.#time(event, element)];
    this.selected = null;
    this.range = { start: Math.min(from, to), end: Math.max(from, to) };
    showRange(this.parts.details, this.runs, this.range);
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
    let told = null;
    if (this.cursor !== null) {
      told = element === this.parts.canvas ? this.#under(event) : this.charts.under(element, this.cursor);
    }
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
    if (this.range) drawRange(context, painter, this.range);
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

  /** What is under the pointer; null on the axis, left of the times, and where there is no row. */
  #find(event) {
    const { canvas, lanes } = this.parts;
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const time = this.#time(event, canvas);
    if (y < AXIS || time < this.view.start) return null;
    const slack = (SLACK * this.view.span) / (this.width - this.gutter);
    return pick(this.rows, y - AXIS + lanes.scrollTop, time, slack);
  }

  #under(event) {
    const found = this.#find(event);
    return found && describePicked(found);
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
