// One run: its slices by lane, and what each of them depends on.

/** Slices of one row, in order of time. `order` has their numbers in the run. */
export function row(starts, ends, families, order) {
  return {
    order,
    starts: Float64Array.from(order, (index) => starts[index]),
    ends: Float64Array.from(order, (index) => ends[index]),
    families: Uint8Array.from(order, (index) => families[index]),
  };
}

/** The same slices, each from the end of those before it on: parts of a collective on several ranks overlap. */
export function inTurn(slices) {
  let free = -Infinity;
  const kept = [];
  slices.ends.forEach((end, place) => {
    if (end > free) kept.push([place, Math.max(slices.starts[place], free)]);
    free = Math.max(free, end);
  });
  const places = kept.map(([place]) => place);
  return {
    order: Uint32Array.from(places, (place) => slices.order[place]),
    starts: Float64Array.from(kept, ([, start]) => start),
    ends: Float64Array.from(places, (place) => slices.ends[place]),
    families: Uint8Array.from(places, (place) => slices.families[place]),
  };
}

/** The place in a row of the first slice that ends after a time. */
export function firstAfter(slices, time) {
  let low = 0;
  let high = slices.ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (slices.ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The place in a row of the slice at a time, or of the nearest one within `slack`; -1 if there is none. */
export function sliceAt(slices, time, slack) {
  const after = firstAfter(slices, time);
  let found = -1;
  let least = slack;
  for (const place of [after, after - 1]) {
    if (place < 0 || place >= slices.starts.length) continue;
    const away = Math.max(slices.starts[place] - time, time - slices.ends[place], 0);
    if (away < least || away === 0) {
      if (away === 0) return place;
      found = place;
      least = away;
    }
  }
  return found;
}

export class Run {
  constructor(data) {
    const { slices, tasks, shift } = data;
    this.data = data;
    this.count = slices.start.length;
    this.start = data.start + shift;
    this.end = data.end + shift;
    this.starts = slices.start.map((time) => time + shift);
    this.ends = this.starts.map((time, index) => time + slices.duration[index]);
    this.families = Uint8Array.from(slices.task, (task) => tasks.family[task]);
    this.lanes = data.lanes.map((lane) => ({ ...lane, indices: [] }));
    for (let index = 0; index < this.count; index++) this.lanes[slices.lane[index]].indices.push(index);
    this.lanes.forEach((lane, number) => {
      // Slices are in order of their ends, which on a lane is that of their starts, apart from those without length.
      lane.slices = row(this.starts, this.ends, this.families, Uint32Array.from(lane.indices));
      lane.number = number;
      delete lane.indices;
    });
    this.cancelled = data.cancelled.time.map((time) => time + shift);
    const path = this.#criticalPath();
    this.path = inTurn(row(this.starts, this.ends, this.families, Uint32Array.from(path)));
    this.found = null; // by slice, whether a search found it
    this.onPath = new Uint8Array(this.count);
    for (const index of path) this.onPath[index] = 1;
  }

  /** The kind of a task. */
  verb(index) {
    const { tasks, slices } = this.data;
    return tasks.verbs[tasks.verb[slices.task[index]]];
  }

  label(index) {
    return this.data.tasks.label[this.data.slices.task[index]];
  }

  labelOfCancelled(place) {
    return this.data.tasks.label[this.data.cancelled.task[place]];
  }

  /** The place of the transfer that was cancelled on a lane at a time, or the nearest one within `slack`; or -1. */
  cancelledAt(lane, time, slack) {
    const away = (place) => Math.abs(this.cancelled[place] - time);
    const near = [...this.cancelled.keys()].filter(
      (place) => this.data.cancelled.lane[place] === lane.number && away(place) <= slack,
    );
    return near.reduce((best, place) => (best < 0 || away(place) < away(best) ? place : best), -1);
  }

  laneOf(index) {
    return this.lanes[this.data.slices.lane[index]];
  }

  /** The name of a lane, with its rank if there are several. */
  laneTitle(lane) {
    return this.ranks > 1 ? `rank ${lane.rank} ${lane.name}` : lane.name;
  }

  get ranks() {
    return new Set(this.data.lanes.map((lane) => lane.rank)).size;
  }

  /** The slices that a slice depends on. */
  producersOf(index) {
    const { firsts, producers } = this.#edges();
    return producers.subarray(firsts[index], firsts[index + 1]);
  }

  /** The slices that depend on a slice. */
  consumersOf(index) {
    const { consumerFirsts, consumers } = this.#edges();
    return consumers.subarray(consumerFirsts[index], consumerFirsts[index + 1]);
  }

  /** What each slice waited for last, back from the one that ended last. */
  #criticalPath() {
    const { before } = this.data.waits;
    const found = [];
    let index = -1;
    for (let each = 0; each < this.count; each++) if (index < 0 || this.ends[each] >= this.ends[index]) index = each;
    for (; index >= 0; index = before[index]) found.push(index);
    return found.reverse();
  }

  /** Edges in both directions, made when they are first asked for. */
  #edges() {
    if (this.edges) return this.edges;
    const { count, back } = this.data.edges;
    const firsts = new Uint32Array(this.count + 1);
    const consumerFirsts = new Uint32Array(this.count + 1);
    const producers = new Uint32Array(back.length);
    for (let index = 0, edge = 0; index < this.count; index++) {
      for (const last = edge + count[index]; edge < last; edge++) {
        producers[edge] = index - back[edge];
        consumerFirsts[producers[edge] + 1]++;
      }
      firsts[index + 1] = edge;
    }
    for (let index = 0; index < this.count; index++) consumerFirsts[index + 1] += consumerFirsts[index];
    const consumers = new Uint32Array(back.length);
    const next = consumerFirsts.slice();
    for (let index = 0; index < this.count; index++) {
      for (let edge = firsts[index]; edge < firsts[index + 1]; edge++) consumers[next[producers[edge]]++] = index;
    }
    this.edges = { firsts, producers, consumerFirsts, consumers };
    return this.edges;
  }
}
