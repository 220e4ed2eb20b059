// Numbers as people read them, in the units of moesched/units.py.

const TIMES = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
const PREFIXES = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]];

const ROUNDED = 0.9995; // from which share of a unit on three digits round to one of it

/** Nanoseconds as a duration with three significant digits, such as "12.3 ms". */
export function duration(nanoseconds) {
  const [unit, size] = TIMES.find(([, size]) => Math.abs(nanoseconds) >= ROUNDED * size) ?? TIMES[3];
  return `${significant(nanoseconds / size)} ${unit}`;
}

/** A point in time in seconds, exact to a ten-thousandth of `span`. */
export function moment(nanoseconds, span) {
  const digits = Math.max(0, Math.min(9, 13 - Math.ceil(Math.log10(Math.max(span, 1)))));
  return `${(nanoseconds / 1e9).toFixed(digits)} s`;
}

/** An amount with a prefix, such as "1.58 GB". */
export function amount(number, unit) {
  const [prefix, size] = PREFIXES.find(([, size]) => Math.abs(number) >= ROUNDED * size) ?? ["", 1];
  return `${significant(number / size)} ${prefix}${unit}`;
}

/** A whole number with separators. */
export function whole(number) {
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

function significant(number) {
  const size = Math.abs(number);
  if (size >= 999.5) return whole(number);
  const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return String(Number(number.toFixed(digits)));
}
