// Finds tasks by words of their names.

export class Finder {
  constructor(runs) {
    this.runs = runs;
    this.clear();
  }

  clear() {
    this.places = [];
    for (const run of this.runs) run.found = null;
  }

  /** Find the tasks whose names have all words of a text, in order of time; an empty text finds none.
   *
   * A word that ends in a digit has to be whole, so that L3 does not find L30.
   */
  search(text) {
    this.clear();
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return;
    for (const run of this.runs) {
      const named = run.data.tasks.label.map((label) => hasAll(label.toLowerCase(), words));
      run.found = Uint8Array.from(run.data.slices.task, (task) => named[task]);
      run.found.forEach((found, index) => found && this.places.push({ run, index }));
    }
    this.places.sort((one, other) => startOf(one) - startOf(other));
  }

  /** The first task found after `from`, or before it if `direction` is -1; at the end, the first one again. */
  next(from, direction) {
    const { places } = this;
    if (!places.length) return null;
    const now = from ? places.findIndex((each) => each.run === from.run && each.index === from.index) : -1;
    if (now >= 0) return places[(now + direction + places.length) % places.length];
    const after = from ? places.findIndex((each) => startOf(each) > startOf(from)) : 0;
    const place = after < 0 ? places.length : after;
    return places[(place - (direction < 0 ? 1 : 0) + places.length) % places.length];
  }
}

function hasAll(label, words) {
  const parts = label.split(" ");
  return words.every((word) => (/\d$/.test(word) ? parts.includes(word) : label.includes(word)));
}

function startOf({ run, index }) {
  return run.starts[index];
}
