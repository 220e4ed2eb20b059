// Tasks and idle spans in words.

import { amount, duration, moment, whole } from "./units.js";

const REASONS = {
  data: "its data",
  room: "room in memory",
  lane: "the lane",
  rank: "another rank",
  await: "the policy awaited it",
};

/** The name of a step. */
export function stepName(step) {
  return step < 0 ? "loading" : step === 0 ? "prefill" : `step ${step}`;
}

/** Pairs of a name and a text about a task. */
export function describe(run, index) {
  const { slices, tasks, lines, states, choices, whys, waits } = run.data;
  const task = slices.task[index];
  const took = slices.duration[index];
  const found = [
    ["lane", run.laneTitle(run.laneOf(index))],
    ["starts", moment(run.starts[index], took)],
    ["takes", duration(took)],
  ];
  const [nbytes, flops] = [tasks.bytes[task], tasks.flops[task]];
  if (nbytes) found.push(["bytes", `${amount(nbytes, "B")}, ${amount((1e9 * nbytes) / took, "B/s")}`]);
  if (flops) found.push(["compute", `${amount(flops, "FLOP")}, ${amount((1e9 * flops) / took, "FLOP/s")}`]);
  if (tasks.pages[task]) found.push(["pages", pagesOf(tasks, task)]);
  if (tasks.rows[task]) found.push(["rows", whole(tasks.rows[task])]);
  const step = slices.step[index];
  found.push(["step", step > 0 ? String(step) : stepName(step)]);
  for (const name of ["layer", "micro_batch", "expert"]) {
    if (tasks[name][task] >= 0) found.push([name.replace("_", "-"), whole(tasks[name][task])]);
  }
  const choice = choices[slices.choice[index]];
  if (choice) found.push(["chosen experts and their rows", choice]);
  const state = states[slices.state[index]];
  if (state !== "done") found.push(["state", state]);
  const before = waits.before[index];
  const reason = REASONS[whys[waits.why[index]]];
  if (before >= 0 && reason) found.push(["waited for", `${run.label(before)} (${reason})`]);
  const line = lines[slices.line[index]];
  if (line) found.push(["submitted by", shortPath(line)]);
  return found;
}

/** Pairs about a transfer that was cancelled. */
export function describeCancelled(run, place) {
  const { cancelled, tasks } = run.data;
  const task = cancelled.task[place];
  const found = [["lane", run.laneTitle(run.lanes[cancelled.lane[place]])], ["cancelled", "before it started"]];
  if (tasks.pages[task]) found.push(["pages", pagesOf(tasks, task)]);
  return found;
}

function pagesOf(tasks, task) {
  const names = tasks.page_names[task];
  return names ? `${whole(tasks.pages[task])} (${names})` : whole(tasks.pages[task]);
}

/** The last folder and the file of a path. */
export function shortPath(path) {
  return path.split(/[/\\]/).slice(-2).join("/");
}

/** An idle span before a task, and what it waited for. */
export function describeIdle(run, lane, index, since) {
  const { whys, waits } = run.data;
  const found = [
    ["lane", run.laneTitle(lane)],
    ["idle", duration(run.starts[index] - since)],
    ["until", run.label(index)],
  ];
  const before = waits.before[index];
  const reason = REASONS[whys[waits.why[index]]];
  if (before >= 0 && reason) found.push(["which waited for", `${run.label(before)} (${reason})`]);
  return found;
}
