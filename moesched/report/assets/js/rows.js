// The rows of the timeline, from top to bottom.

export const AXIS = 26;
export const BELOW = 4;
const TITLE = 26;
const RANK = 20;
const STEPS = 18;
const PATH = 18;
const LANE = 26;
const TALL_LANE = 34;
const FEW_LANES = 10;
const EMPTY_LANE = 18;
const GAP = 10;

/** Rows with their places, and the height of all of them. A row is a title, a rank, steps, a path or a lane. */
export function rowsOf(runs, showPath) {
  const rows = [];
  let y = 0;
  const lanes = runs.reduce((count, run) => count + run.lanes.length, 0);
  const laneHeight = lanes <= FEW_LANES ? TALL_LANE : LANE;
  const add = (kind, height, run, more) => {
    rows.push({ kind, y, height, run, ...more });
    y += height;
  };
  runs.forEach((run, number) => {
    if (number) y += GAP;
    if (run.data.title) add("title", TITLE, run, { name: run.data.title });
    add("steps", STEPS, run, { name: "steps" });
    if (showPath) add("path", PATH, run, { name: "critical path", slices: run.path });
    let rank = -1;
    for (const lane of run.lanes) {
      if (run.ranks > 1 && lane.rank !== rank) add("rank", RANK, run, { name: `rank ${lane.rank}` });
      rank = lane.rank;
      add("lane", lane.slices.order.length ? laneHeight : EMPTY_LANE, run, { name: lane.name, lane, slices: lane.slices });
    }
  });
  return { rows, height: y };
}

/** The row at a height; null if there is none. */
export function rowAt(rows, y) {
  return rows.find((row) => y >= row.y && y < row.y + row.height) ?? null;
}
