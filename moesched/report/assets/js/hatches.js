// Hatches of the families of tasks, which tell them apart without their colours.

import { inkOn } from "./theme.js";

const TILE = 8;
const COVER = 0.38;

/** By family, lines of a tile from x, y to x, y; those without any are plain. */
const LINES = {
  experts: [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]],
  weights: [[-2, 6, 2, 10], [0, 0, 8, 8], [6, -2, 10, 2]],
  activations: [[0, 2, 8, 2], [0, 6, 8, 6]],
  exchange: [[0, 4, 8, 4], [4, 0, 4, 8]],
  choices: [[2, 0, 2, 8], [6, 0, 6, 8]],
  other: [[3, 4, 5, 4]],
};

/** A tile of a family's hatch; null where it is plain. */
export function tileOf({ name, colour }) {
  if (!LINES[name]) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = TILE;
  const context = tile.getContext("2d");
  context.strokeStyle = inkOn(colour);
  context.globalAlpha = COVER;
  for (const [x1, y1, x2, y2] of LINES[name]) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }
  return tile;
}
