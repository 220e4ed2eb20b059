// What is at a place of the lanes: a row, and the task, the cancelled transfer, the idle span or the step there.

import { describe, describeCancelled, describeIdle } from "./describe.js";
import { rowAt } from "./rows.js";
import { firstAfter, sliceAt } from "./run.js";
import { duration, moment } from "./units.js";

/** The row at a height, and the number of its slice at a time or nearest within `slack`, -1 if there is none; or null. */
export function pick(rows, y, time, slack) {
  const row = rowAt(rows, y);
  if (!row) return null;
  const place = row.slices ? sliceAt(row.slices, time, slack) : -1;
  return { row, time, slack, index: place < 0 ? -1 : row.slices.order[place] };
}

/** What was picked, as a heading and pairs; null if there is nothing to tell. */
export function describePicked({ row, time, slack, index }) {
  if (row.kind === "steps") return describeStep(row, time);
  if (!row.slices) return null;
  if (row.lane) {
    const place = row.run.cancelledAt(row.lane, time, slack);
    if (place >= 0) return { heading: row.run.labelOfCancelled(place), pairs: describeCancelled(row.run, place) };
  }
  if (index >= 0) return { heading: row.run.label(index), pairs: describe(row.run, index) };
  const next = firstAfter(row.slices, time);
  if (row.kind !== "lane" || next >= row.slices.order.length) return null;
  const since = next > 0 ? row.slices.ends[next - 1] : row.run.start;
  return { heading: "", pairs: describeIdle(row.run, row.lane, row.slices.order[next], since) };
}

function describeStep(row, time) {
  const step = row.run.steps.find((each) => time >= each.start && time < each.end);
  if (!step) return null;
  const took = step.end - step.start;
  return { heading: step.name, pairs: [["starts", moment(step.start, took)], ["takes", duration(took)]] };
}
