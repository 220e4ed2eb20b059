// The tooltip, and the panel about the selected task.

import { describe } from "./describe.js";
import { make } from "./dom.js";
import { useOf } from "./idle.js";
import { duration, moment, whole } from "./units.js";

const SHOWN_TASKS = 8;
const AWAY = 14;

/** Show a heading and pairs beside the pointer; without pairs, show nothing. */
export function showTooltip(tooltip, pointer, heading, pairs) {
  tooltip.hidden = !pairs;
  if (!pairs) return;
  const lines = pairs.map(([name, text]) => make("div", `${name}: ${text}`));
  tooltip.replaceChildren(...(heading ? [make("strong", heading)] : []), ...lines);
  const { width, height } = tooltip.getBoundingClientRect();
  const left = pointer.x + AWAY + width > innerWidth ? pointer.x - AWAY - width : pointer.x + AWAY;
  const top = pointer.y + AWAY + height > innerHeight ? pointer.y - AWAY - height : pointer.y + AWAY;
  tooltip.style.left = `${Math.max(4, left)}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}

/** Show a selected task in the panel, with buttons that select what it depends on and what depends on it. */
export function showDetails(panel, selected, select) {
  if (!selected) {
    panel.replaceChildren();
    return;
  }
  const { run, index } = selected;
  const pairs = describe(run, index).map(([name, text]) => make("div", "", make("dt", name), make("dd", text)));
  panel.replaceChildren(
    make("h3", run.label(index)),
    make("dl", "", ...pairs),
    tasks("depends on", run, run.producersOf(index), select),
    tasks("needed by", run, run.consumersOf(index), select),
  );
}

/** Show how busy each lane was in a range of time, and what it waited for; nothing if the range is empty. */
export function showRange(panel, runs, { start, end }) {
  const span = end - start;
  if (!span) {
    panel.replaceChildren();
    return;
  }
  const share = (nanoseconds) => `${((100 * nanoseconds) / span).toFixed(1)}%`;
  const body = make("tbody");
  for (const run of runs) {
    for (const lane of run.lanes) {
      const { busy, causes } = useOf(run, lane, start, end);
      const told = causes.map(([cause, spent]) => `${cause} ${share(spent)}`).join(", ");
      const name = run.data.title ? `${run.data.title}: ${run.laneTitle(lane)}` : run.laneTitle(lane);
      body.append(make("tr", "", ...[name, share(busy), told].map((cell) => make("td", cell))));
    }
  }
  const head = make("tr", "", ...["lane", "busy", "idle, by cause"].map((name) => make("th", name)));
  const wide = make("div", "", make("table", "", make("thead", "", head), body));
  wide.className = "wide";
  panel.replaceChildren(make("h3", `${duration(span)} from ${moment(start, span)}`), wide);
}

function tasks(name, run, indices, select) {
  const buttons = Array.from(indices.subarray(0, SHOWN_TASKS), (index) => {
    const button = make("button", run.label(index));
    button.type = "button";
    button.title = `${run.label(index)}, on ${run.laneTitle(run.laneOf(index))}`;
    button.addEventListener("click", () => select({ run, index }));
    return button;
  });
  const more = indices.length - buttons.length;
  const row = make("div", "", make("span", name), ...buttons);
  if (!indices.length) row.append("nothing that was recorded");
  if (more > 0) row.append(`and ${whole(more)} more`);
  row.className = "tasks";
  return row;
}
