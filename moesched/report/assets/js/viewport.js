// The part of the time that is shown, in nanoseconds.

const LEAST = 50;
const MARGIN = 0.02;
const LONG_LOADING = 0.15;

/** The part of the time that runs are shown with at first: all of it, or that after loading if loading is long. */
export function firstView(runs) {
  const start = Math.min(...runs.map((run) => run.start));
  const end = Math.max(...runs.map((run) => run.end));
  const loaded = runs.map((run) => run.steps.find((each) => each.step >= 0)?.start ?? run.start);
  const begun = Math.min(...loaded);
  return begun - start > LONG_LOADING * (end - start) ? [begun, end] : [start, end];
}

export class Viewport {
  /** `changed` is called after every change. */
  constructor(start, end, changed) {
    const margin = MARGIN * Math.max(end - start, LEAST);
    this.first = start - margin;
    this.last = end + margin;
    this.changed = changed;
    this.start = this.first;
    this.end = this.last;
  }

  get span() {
    return this.end - this.start;
  }

  /** Whether all of the time is shown. */
  get isWhole() {
    return this.span >= (this.last - this.first) * (1 - 1e-9);
  }

  /** Show a part of the time, as much of it as there is. */
  show(start, end) {
    const span = Math.min(Math.max(end - start, LEAST), this.last - this.first);
    this.start = Math.min(Math.max((start + end - span) / 2, this.first), this.last - span);
    this.end = this.start + span;
    this.changed();
  }

  /** Show more (`factor` above 1) or less, with the time at `share` of the width in its place. */
  zoom(factor, share = 0.5) {
    const span = Math.min(Math.max(this.span * factor, LEAST), this.last - this.first);
    const start = this.start + share * (this.span - span);
    this.show(start, start + span);
  }

  /** Move by a share of what is shown. */
  pan(share) {
    const way = share * this.span;
    this.show(this.start + way, this.end + way);
  }

  whole() {
    this.show(this.first, this.last);
  }

  /** Move to a time that is not shown. */
  reveal(start, end) {
    if (start < this.start || end > this.end) {
      const span = Math.max(this.span, 1.2 * (end - start));
      this.show((start + end - span) / 2, (start + end + span) / 2);
    }
  }
}
