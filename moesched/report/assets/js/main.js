// Starts the page: unpacks its data, and shows the timeline if there is one.

import { unpack } from "./data.js";
import { make, swatch } from "./dom.js";
import { press } from "./input.js";
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
    element("empty").hidden = false;
    switchTheme(element("theme"), () => {});
    return;
  }
  element("timeline").hidden = false;
  showLegend(data.families, runs);
  const lanes = element("lanes");
  const timeline = new Timeline(runs, data.families, {
    lanes,
    canvas: lanes.querySelector("canvas"),
    spacer: element("spacer"),
    details: element("details"),
    tooltip: element("tooltip"),
    charts: element("charts"),
    pathButton: element("path"),
  });
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => press(timeline, button.dataset.key));
  }
  switchTheme(element("theme"), () => timeline.recolour());
  timeline.resize();
}

function showLegend(families, runs) {
  families.forEach((family, number) => {
    if (!runs.some((run) => run.families.includes(number))) return;
    element("legend").append(make("li", "", swatch(family.colour), family.meaning));
  });
  if (runs.some((run) => run.cancelled.length)) element("legend").append(make("li", "× cancelled transfer"));
}

start().catch((error) => {
  element("failed").textContent = `The timeline cannot be shown: ${error}. It needs a browser of 2023 or later.`;
  element("failed").hidden = false;
  throw error;
});
