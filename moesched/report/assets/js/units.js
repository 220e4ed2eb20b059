// Numbers as people read them, in the units of moesched/units.py.

const TIMES = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
const PREFIXES = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]];

/** Nanoseconds as a duration with three significant digits, such as "12.3 ms". */
export function duration(nanoseconds) {
  const [unit, size] = TIMES.find(([, size]) => Math.abs(nanoseconds) >= size) ?? TIMES[3];
  return `${significant(nanoseconds / size)} ${unit}`;
}

/** A point in time in seconds, exact to a ten-thousandth of `span`. */
export function moment(nanoseconds, span) {
  const digits = Math.max(0, Math.min(9, 13 - Math.ceil(Math.log10(Math.max(span, 1)))));
  return `${(nanoseconds / 1e9).toFixed(digits)} s`;
}

/** An amount with a prefix, such as "1.58 GB". */
export function amount(number, unit) {
  const [prefix, size] = PREFIXES.find(([, size]) => Math.abs(number) >= size) ?? ["", 1];
  return `${significant(number / size)} ${prefix}${unit}`;
}

/** A whole number with separators. */
export function whole(number) {
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

function significant(number) {
  const size = Math.abs(number);
  if (size >= 1000) return whole(number);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return String(Number(number.toFixed(digits)));
}
