// Marks over the lanes: the tasks that were found, and the range that was dragged.

import { AXIS } from "./rows.js";
import { firstAfter } from "./run.js";

const FOUND = 4;
const RANGE_TINT = 0.16;

/** Mark the tasks of a lane that were found; those that share a pixel once. */
export function drawFound(context, painter, row, y) {
  const { slices, run } = row;
  const { view, gutter, width, colours } = painter.scene;
  context.fillStyle = colours.found;
  let last = -1;
  for (let place = firstAfter(slices, view.start); place < slices.order.length && slices.starts[place] < view.end; place++) {
    if (!run.found[slices.order[place]]) continue;
    const left = Math.max(gutter, Math.round(painter.x(slices.starts[place])));
    const right = Math.min(width, Math.max(left + 2, Math.round(painter.x(slices.ends[place]))));
    if (right <= last) continue;
    context.fillRect(Math.max(left, last), y, right - Math.max(left, last), FOUND);
    last = right;
  }
}

/** Tint a range of time, and draw its ends. */
export function drawRange(context, painter, { start, end }) {
  const { height, colours } = painter.scene;
  const [left, right] = [painter.x(start), painter.x(end)];
  context.globalAlpha = RANGE_TINT;
  context.fillStyle = colours.accent;
  context.fillRect(left, 0, right - left, height);
  context.globalAlpha = 1;
  for (const x of [left, right]) context.fillRect(Math.round(x) - 1, AXIS, 2, height);
}
