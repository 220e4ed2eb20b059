// The use of each lane and the height of all rows, as JSON, of a page's unpacked data; tests/test_report_scripts.py runs it.

import { readFileSync } from "node:fs";

import { revive } from "./js/data.js";
import { useOf } from "./js/idle.js";
import { AXIS, BELOW, rowsOf } from "./js/rows.js";
import { Run } from "./js/run.js";

const bytes = readFileSync(process.argv[2]);
const runs = revive(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length)).runs.map((each) => new Run(each));
const lanes = runs.map((run) =>
  Object.fromEntries(
    run.lanes.map((lane) => {
      const { busy, causes } = useOf(run, lane, run.start, run.end);
      return [run.laneTitle(lane), { busy, ...Object.fromEntries(causes) }];
    }),
  ),
);
console.log(JSON.stringify({ lanes, height: rowsOf(runs, true).height + AXIS + BELOW }));
