// The selected task, with arrows from what it depends on and to what depends on it.

const MOST_ARROWS = 200;
const FAR = 4000;
const HEAD = 5;
const ARC = 24;

/** Draw the outline and the arrows of a selected task. `place` gives the {left, right, top, bottom} of a slice. */
export function drawSelected(context, run, index, place, colours) {
  const own = place(index);
  if (!own) return;
  for (const [others, dashed] of [[run.producersOf(index), false], [run.consumersOf(index), true]]) {
    context.setLineDash(dashed ? [5, 3] : []);
    for (const other of others.subarray(0, MOST_ARROWS)) {
      const its = place(other);
      if (!its) continue;
      const [from, to] = dashed ? [own, its] : [its, own];
      arrow(context, from, to, colours);
    }
  }
  context.setLineDash([]);
  context.strokeStyle = colours.page;
  context.lineWidth = 4;
  outline(context, own);
  context.strokeStyle = colours.selected;
  context.lineWidth = 2;
  outline(context, own);
}

function outline(context, { left, right, top, bottom }) {
  const start = Math.max(left, -FAR);
  context.strokeRect(start - 1, top - 1, Math.max(Math.min(right, FAR * 2) - start, 1) + 2, bottom - top + 2);
}

function arrow(context, from, to, colours) {
  const x1 = near(from.right);
  const x2 = near(to.left);
  const y1 = (from.top + from.bottom) / 2;
  const y2 = (to.top + to.bottom) / 2;
  const arc = y1 === y2 ? ARC : 0; // within a lane, leave its labels readable
  const bend = Math.max(12, Math.min(60, Math.abs(x2 - x1) / 2));
  for (const [colour, width] of [[colours.page, 3.5], [colours.selected, 1.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1 + bend, y1 - arc, x2 - bend, y2 - arc, x2, y2);
    context.stroke();
  }
  context.fillStyle = colours.selected;
  context.beginPath();
  context.moveTo(x2, y2);
  context.lineTo(x2 - HEAD * 1.6, y2 - HEAD);
  context.lineTo(x2 - HEAD * 1.6, y2 + HEAD);
  context.fill();
}

// Canvases are not exact far outside of their frame.
function near(x) {
  return Math.max(-FAR, Math.min(x, 2 * FAR));
}
