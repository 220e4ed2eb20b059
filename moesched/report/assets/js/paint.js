// Draws the rows that are in view.

import { tileOf } from "./hatches.js";
import { drawFound } from "./marks.js";
import { rectangles } from "./merge.js";
import { AXIS } from "./rows.js";
import { inkOn, laidOver } from "./theme.js";
import { ticks } from "./ticks.js";

const FONT = "11.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const BOLD = `600 ${FONT}`;
const TICK_WIDTH = 110;
const LABEL_WIDTH = 28;
const LABEL_HEIGHT = 13;
const PADDING = 4;
const NAME_GAP = 2;
const CROSS = 3;
const HATCHED_WIDTH = 6;
const NARROW_GUTTER = 100;
const TINT = 0.25;

export class Painter {
  constructor(context, families) {
    this.context = context;
    this.families = families.map((family) => family.colour);
    this.inks = this.families.map(inkOn);
    this.hatches = families.map((family) => {
      const tile = tileOf(family);
      return tile && context.createPattern(tile, "repeat");
    });
    this.widths = new Map();
  }

  /**
   * Draw everything.
   *
   * @param {object} scene - rows, view, width and height of the canvas, gutter, scroll, colours, showPath, cursor
   */
  paint(scene) {
    const { context } = this;
    this.scene = scene;
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = scene.colours.page;
    context.fillRect(0, 0, scene.width, scene.height);
    const axis = ticks(scene.view.start, scene.view.end, (scene.width - scene.gutter) / TICK_WIDTH);
    this.#grid(axis);
    context.save();
    this.#clip(0, AXIS, scene.width, scene.height - AXIS);
    for (const row of scene.rows) {
      const y = this.top(row);
      if (y + row.height > AXIS && y < scene.height) this.#row(row, y);
    }
    context.restore();
    this.#axis(axis);
  }

  /** Use the colours of a theme. */
  recolour(colours) {
    this.tints = this.families.map((colour) => laidOver(colour, colours.page, TINT));
  }

  /** The pixel of a time. */
  x(time) {
    const { view, gutter, width } = this.scene;
    return gutter + ((time - view.start) / view.span) * (width - gutter);
  }

  /** The upper pixel of a row. */
  top(row) {
    return AXIS + row.y - this.scene.scroll;
  }

  #clip(x, y, width, height) {
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
  }

  #grid({ marks }) {
    const { context, scene } = this;
    context.fillStyle = scene.colours.line;
    for (const mark of marks) context.fillRect(Math.round(this.x(mark.time)), AXIS, 1, scene.height - AXIS);
  }

  #axis({ marks, baseLabel }) {
    const { context, scene } = this;
    context.fillStyle = scene.colours.raised;
    context.fillRect(0, 0, scene.width, AXIS);
    context.fillStyle = scene.colours.line;
    context.fillRect(0, AXIS - 1, scene.width, 1);
    context.fillRect(scene.gutter - 1, 0, 1, scene.height);
    context.fillStyle = scene.colours.quiet;
    if (baseLabel) {
      context.textAlign = "right";
      context.fillText(baseLabel, scene.gutter - PADDING - 2, AXIS / 2);
    }
    context.textAlign = "left";
    for (const mark of marks) {
      const x = this.x(mark.time);
      if (x < scene.gutter || x + context.measureText(mark.label).width > scene.width) continue;
      context.fillRect(Math.round(x), AXIS - 7, 1, 6);
      context.fillText(mark.label, x + PADDING, AXIS / 2);
    }
    context.textAlign = "left";
  }

  #row(row, y) {
    const { context, scene } = this;
    if (row.kind === "title" || row.kind === "rank") {
      context.fillStyle = scene.colours.raised;
      context.fillRect(0, y, scene.width, row.height);
      this.#name(row, y, 8, row.kind === "title" ? scene.colours.ink : scene.colours.quiet, scene.width);
      return;
    }
    context.fillStyle = scene.colours.line;
    if (row.kind === "lane") context.fillRect(0, y + row.height - 1, scene.width, 1);
    const named = row.kind === "lane" && row.slices.order.length ? scene.colours.ink : scene.colours.quiet;
    const indent = scene.gutter < NARROW_GUTTER ? 3 : row.run.ranks > 1 && row.kind === "lane" ? 18 : 8;
    this.#name(row, y, indent, named, scene.gutter);
    context.save();
    this.#clip(scene.gutter, y, scene.width - scene.gutter, row.height);
    if (row.kind === "steps") this.#steps(row, y);
    else this.#slices(row, y);
    context.restore();
  }

  #name(row, y, x, colour, room) {
    const { context } = this;
    context.fillStyle = colour;
    context.font = row.kind === "title" ? BOLD : FONT;
    context.fillText(this.#fitted(row.name, room - x - NAME_GAP), x, y + row.height / 2 + 0.5);
    context.font = FONT;
  }

  #steps(row, y) {
    const { context, scene } = this;
    for (const each of row.run.steps) {
      const left = Math.max(this.x(each.start), scene.gutter);
      const right = Math.min(this.x(each.end), scene.width);
      if (right - left < 2) continue;
      context.fillStyle = scene.colours.band;
      context.fillRect(left + 0.5, y + 2, right - left - 1, row.height - 4);
      const label = [each.name, each.short].find((name) => this.#width(name) <= right - left - 2 * PADDING);
      context.fillStyle = scene.colours.quiet;
      if (label) context.fillText(label, left + PADDING, y + row.height / 2 + 0.5);
    }
  }

  #slices(row, y) {
    const { context, scene } = this;
    const { run, slices } = row;
    const height = row.height - 5;
    const labelled = [];
    const onPath = [];
    const hatched = [];
    let last = "";
    const fill = (colour, ...box) => {
      if (colour !== last) context.fillStyle = last = colour;
      context.fillRect(...box);
    };
    rectangles(slices, scene.view.start, scene.view.end, scene.width - scene.gutter, (left, right, family, cover, place) => {
      // Whole pixels are drawn much faster; a gap tells wide neighbours apart.
      const [from, to] = [Math.round(left), Math.round(right)];
      const width = to - from;
      const drawn = width > 3 && place >= 0 ? width - 1 : Math.max(width, 1);
      const filled = Math.max(2, Math.round(cover * height));
      if (filled < height) fill(this.tints[family], scene.gutter + from, y + 2, drawn, height - filled);
      const box = [scene.gutter + from, y + 2 + height - filled, drawn, filled];
      fill(this.families[family], ...box);
      if (drawn >= HATCHED_WIDTH && this.hatches[family]) hatched.push([family, box]);
      if (place < 0) return;
      if (width >= LABEL_WIDTH) labelled.push(left, right, family, place);
      if (run.onPath[slices.order[place]]) onPath.push(left, right);
    });
    for (const [family, box] of hatched) fill(this.hatches[family], ...box);
    this.#labels(row, labelled, y + 2.5 + height / 2);
    if (row.kind === "lane") this.#cancelled(row, y + 2 + height / 2);
    if (row.kind === "lane" && run.found) drawFound(context, this, row, y);
    if (!scene.showPath || row.kind !== "lane") return;
    context.fillStyle = scene.colours.path;
    for (let at = 0; at < onPath.length; at += 2) {
      context.fillRect(scene.gutter + onPath[at], y + height + 0.5, Math.max(1, onPath[at + 1] - onPath[at] - 0.75), 2.5);
    }
  }

  /** A cross for each transfer that was cancelled. */
  #cancelled({ run, lane }, y) {
    const { context, scene } = this;
    context.strokeStyle = scene.colours.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    let last = -CROSS;
    run.cancelled.forEach((time, place) => {
      const x = Math.round(this.x(time));
      if (run.data.cancelled.lane[place] !== lane.number || x - last < 1 || x < scene.gutter || x > scene.width) return;
      last = x;
      context.moveTo(x - CROSS, y - CROSS);
      context.lineTo(x + CROSS, y + CROSS);
      context.moveTo(x - CROSS, y + CROSS);
      context.lineTo(x + CROSS, y - CROSS);
    });
    context.stroke();
  }

  /** Labels of slices; `labelled` has the left, right, family and place of each. */
  #labels({ run, slices }, labelled, y) {
    const { context, scene } = this;
    for (let at = 0; at < labelled.length; at += 4) {
      const [left, right, family, place] = labelled.slice(at, at + 4);
      const whole = run.label(slices.order[place]);
      const room = right - left - 2 * PADDING;
      const short = whole.slice(whole.indexOf(" ") + 1); // layer, expert and micro-batch tell more than half a verb
      const label = this.#width(whole) > room && this.#width(short) <= room ? short : this.#fitted(whole, room);
      if (!label) continue;
      if (this.hatches[family]) {
        context.fillStyle = this.families[family]; // hatches would make letters hard to read
        context.fillRect(scene.gutter + left + 1, y - LABEL_HEIGHT / 2, this.#width(label) + PADDING + 2, LABEL_HEIGHT);
      }
      context.fillStyle = this.inks[family];
      context.fillText(label, scene.gutter + left + PADDING, y);
    }
  }

  /** A text, cut off where it would be wider than `room` pixels; empty if not even three letters fit. */
  #fitted(text, room) {
    const width = this.#width(text);
    if (width <= room) return text;
    const letters = Math.floor((room / width) * text.length) - 1;
    return letters < 3 ? "" : `${text.slice(0, letters)}…`;
  }

  /** The width of a text without kerning: measuring each letter once is much faster than measuring every label. */
  #width(text) {
    let width = 0;
    for (const letter of text) {
      let its = this.widths.get(letter);
      if (its === undefined) this.widths.set(letter, (its = this.context.measureText(letter).width));
      width += its;
    }
    return width;
  }
}
