// Rows of the tables, and the places in the timeline that they tell of.

const LANE_COLUMNS = ["lane", "on", "on lane"];
const KIND_COLUMNS = ["kind", "kernel", "before"];
const CURVE_COLUMNS = ["pool", "memory"];

/** Let a click or Enter on a row of a table go to its place. */
export function listenToRows(parent, go) {
  for (const table of parent.querySelectorAll("table")) {
    const columns = Array.from(table.tHead.rows[0].cells, (cell) => cell.textContent);
    for (const row of table.tBodies[0].rows) {
      row.tabIndex = 0;
      const chosen = () => go(placeOf(columns, Array.from(row.cells, (cell) => cell.textContent)));
      row.addEventListener("click", () => getSelection().isCollapsed && chosen());
      row.addEventListener("keydown", (event) => event.key === "Enter" && chosen());
    }
  }
}

/** What a row says of its place: lane, kind, phase, the task that it leads to, a curve, and all of its text. */
export function placeOf(columns, cells) {
  const cell = (names) => cells[columns.findIndex((column) => names.includes(column))] ?? "";
  return {
    lane: cell(LANE_COLUMNS),
    kind: cell(KIND_COLUMNS),
    phase: cell(["phase"]),
    until: cell(["until"]),
    curve: cell(CURVE_COLUMNS),
    text: cells.join(" "),
  };
}

/** The task of a run that a place leads to, the longest of several; -1 if it names none. */
export function taskAt(run, place) {
  const names = run.lanes.map((lane) => run.laneTitle(lane));
  const { verbs } = run.data.tasks;
  const named = place.lane || place.kind; // otherwise they are somewhere in the text
  const lane = named ? names.indexOf(place.lane) : longestIn(names, place.text);
  const kind = named ? verbs.indexOf(place.kind) : longestIn(verbs, place.text);
  const { slices, tasks } = run.data;
  if (kind < 0 && lane < 0 && !place.until) return -1;
  let found = -1;
  for (let index = 0; index < run.count; index++) {
    const step = slices.step[index];
    if (place.until && `${run.label(index)}, step ${step}` !== place.until) continue;
    if (lane >= 0 && slices.lane[index] !== lane) continue;
    if (!place.until && kind >= 0 && tasks.verb[slices.task[index]] !== kind) continue;
    if (step < 0 || (place.phase && (step > 0) !== (place.phase === "decode"))) continue;
    if (found < 0 || slices.duration[index] > slices.duration[found]) found = index;
  }
  return found;
}

/** The place of the longest name that is in a text as a word; -1 if none is. */
function longestIn(names, text) {
  const words = ` ${text.replace(/[",:]/g, " ")} `;
  return names.reduce(
    (best, name, place) => (words.includes(` ${name} `) && (best < 0 || name.length > names[best].length) ? place : best),
    -1,
  );
}
