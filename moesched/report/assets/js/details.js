// The tooltip, and the panel about the selected task.

import { describe } from "./describe.js";
import { make } from "./dom.js";
import { whole } from "./units.js";

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
