// Marks on the time axis: whole numbers of a unit, with few digits at every zoom.

const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

/**
 * Marks for about `count` places between two times.
 *
 * Labels count from `base`, a whole number of the next larger unit, so that they stay short far from the start.
 */
export function ticks(start, end, count) {
  const step = niceStep((end - start) / Math.max(1, count));
  const place = Math.max(0, UNITS.findIndex(([, size]) => step >= size / 100 - 1e-9));
  const [unit, size] = step < 0.01 ? UNITS[3] : UNITS[place];
  const larger = place > 0 ? UNITS[place - 1] : null;
  const base = larger ? Math.max(0, Math.floor(start / larger[1]) * larger[1]) : 0;
  const digits = Math.max(0, Math.min(2, Math.ceil(-Math.log10(step / size) - 1e-9)));
  const marks = [];
  for (let number = Math.ceil(start / step); number * step <= end; number++) {
    const time = number * step;
    marks.push({ time, label: `${((time - base) / size).toFixed(digits)} ${unit}` });
  }
  return { base, baseLabel: base ? `${baseText(base)} +` : "", marks };
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least - 1e-9) ?? 10 * power;
}

function baseText(base) {
  const seconds = base / 1e9;
  const digits = base % 1e9 === 0 ? 0 : base % 1e6 === 0 ? 3 : 6;
  return `${seconds.toFixed(digits)} s`;
}
