// Busy and idle time of a lane, and the causes of the latter, by the rules of moesched/analysis/idle_spans.py.

import { firstAfter } from "./run.js";

const ROUTERS = ["route", "preview_route"];
const LASTING = ["budget", "router", "rank"];
const CAUSES = { data: "data", lane: "lane", room: "budget", rank: "rank", await: "data" };

/** Nanoseconds in which a lane was busy between two times, and idle by cause, the largest first. */
export function useOf(run, lane, from, to) {
  const { order, starts, ends } = lane.slices;
  const causes = new Map();
  let busy = 0;
  const add = (cause, start, end) => {
    const spent = Math.min(end, to) - Math.max(start, from);
    if (spent > 0) causes.set(cause, (causes.get(cause) ?? 0) + spent);
  };
  for (let place = firstAfter(lane.slices, from); place < order.length; place++) {
    const since = place ? ends[place - 1] : run.start;
    if (since >= to) break;
    busy += Math.max(0, Math.min(ends[place], to) - Math.max(starts[place], from));
    if (starts[place] > since) idleParts(run, order[place], since, add);
  }
  add("finished", order.length ? ends[order.length - 1] : run.start, run.end);
  return { busy, causes: [...causes].sort((one, other) => other[1] - one[1]) };
}

/** Call `add(cause, start, end)` for each part of the time before a slice started, back to a time. */
function idleParts(run, index, since, add) {
  const { before, why, policy, host } = run.data.waits;
  const { whys } = run.data;
  const first = before[index];
  let until = run.starts[index];
  let lasting = null;
  while (until > since) {
    for (const [cause, nanoseconds] of [["host", host[index]], ["policy", policy[index]]]) {
      const begun = Math.max(until - nanoseconds, since);
      add(cause, begun, until);
      until = begun;
    }
    const previous = before[index];
    if (previous < 0) return;
    const cause = lasting ?? causeOf(run, previous, whys[why[index]]);
    if (previous === first && LASTING.includes(cause)) lasting = cause;
    const begun = Math.max(run.starts[previous], since);
    if (begun < until) {
      add(cause, begun, until);
      until = begun;
    }
    index = previous;
  }
}

/** The cause of the time in which a slice runs while another one waits for it. */
function causeOf(run, before, why) {
  return why === "await" && ROUTERS.includes(run.verb(before)) ? "router" : CAUSES[why];
}
