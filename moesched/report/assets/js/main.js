// Starts the page: unpacks its data, and shows the timeline if there is one.

import { unpack } from "./data.js";
import { tileOf } from "./hatches.js";
import { press } from "./input.js";
import { listenToRows, taskAt } from "./places.js";
import { Run } from "./run.js";
import { switchTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

function element(id) {
  return document.getElementById(id);
}

async function start() {
  const data = await unpack(element("data").textContent);
  element("data").remove();
  const runs = data.runs.map((each) => new Run(each)).filter((run) => run.count > 0);
  if (!runs.length) {
    switchTheme(element("theme"), () => {});
    return;
  }
  fillSwatches(data.families);
  const lanes = element("lanes");
  const timeline = new Timeline(runs, data.families, {
    lanes,
    canvas: lanes.querySelector("canvas"),
    spacer: element("spacer"),
    details: element("details"),
    tooltip: element("tooltip"),
    charts: element("charts"),
    pathButton: element("path"),
    find: element("find"),
    found: element("found"),
  });
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => press(timeline, button.dataset.key));
  }
  listenToRows(element("tables"), (place) => go(timeline, place));
  switchTheme(element("theme"), () => timeline.recolour());
  timeline.resize();
}

function fillSwatches(families) {
  for (const swatch of document.querySelectorAll("[data-family]")) {
    const family = families[swatch.dataset.family];
    const tile = tileOf(family);
    swatch.style.backgroundColor = family.colour;
    if (tile) swatch.style.backgroundImage = `url(${tile.toDataURL()})`;
  }
}

/** Show the place that a row of a table tells of; of several runs, in the last one that has it. */
function go(timeline, place) {
  const curve = timeline.charts.named(place.curve);
  const found = timeline.runs.map((run) => ({ run, index: taskAt(run, place) })).filter(({ index }) => index >= 0).at(-1);
  if (!curve && found) {
    timeline.select(found);
    timeline.zoomToSelected();
  } else {
    timeline.view.whole();
  }
  (curve ?? element("lanes")).scrollIntoView({ block: "center" });
}

start().catch((error) => {
  element("failed").textContent = `The timeline cannot be shown: ${error}. It needs a browser of 2023 or later.`;
  element("failed").hidden = false;
  throw error;
});
