// The rectangles of one row. Slices narrower than a pixel are merged with their neighbours.

import { firstAfter } from "./run.js";

const LEVELS = 8;
const FAMILIES = 16;

/**
 * Call `emit(left, right, family, cover, place)` for each rectangle between two times, in pixels from 0 to `width`.
 *
 * `place` is the place of the slice in the row. Merged slices have -1, the family that most of their time has, and in
 * `cover` the share of their pixels that they cover, in eighths.
 */
export function rectangles(slices, start, end, width, emit) {
  const { starts, ends, families } = slices;
  const scale = width / (end - start);
  const covered = new Float64Array(FAMILIES);
  let column = -1; // the pixel that is being summed up
  let left = 0; // the merged rectangle that may still grow
  let right = 0;
  let family = -1;
  let level = 0;

  function closeRectangle() {
    if (family >= 0) emit(left, right, family, level / LEVELS, -1);
    family = -1;
  }

  function closeColumn() {
    if (column < 0) return;
    let most = 0;
    let total = 0;
    for (let each = 0; each < FAMILIES; each++) {
      total += covered[each];
      if (covered[each] > covered[most]) most = each;
    }
    covered.fill(0);
    const found = Math.min(LEVELS, Math.round(total * LEVELS));
    if (family !== most || level !== found || right !== column) {
      closeRectangle();
      left = column;
      family = most;
      level = found;
    }
    right = column + 1;
    column = -1;
  }

  for (let place = firstAfter(slices, start); place < starts.length && starts[place] < end; place++) {
    const from = (starts[place] - start) * scale;
    const to = (ends[place] - start) * scale;
    if (to - from >= 1) {
      closeColumn();
      closeRectangle();
      emit(Math.max(from, 0), Math.min(to, width), families[place], 1, place);
    } else {
      const pixel = Math.max(0, Math.floor(from));
      if (pixel !== column) {
        closeColumn();
        column = pixel;
      }
      covered[families[place]] += to - from;
    }
  }
  closeColumn();
  closeRectangle();
}
