// The parts of a report's scripts that need no browser; tests/test_report_scripts.py runs them in node.

import assert from "node:assert/strict";
import test from "node:test";

import { lastUpTo } from "./js/charts.js";
import { revive } from "./js/data.js";
import { describe, describeCancelled, describeIdle } from "./js/describe.js";
import { showRange } from "./js/details.js";
import { Finder } from "./js/finder.js";
import { useOf } from "./js/idle.js";
import { press } from "./js/input.js";
import { rectangles } from "./js/merge.js";
import { placeOf, taskAt } from "./js/places.js";
import { rowAt, rowsOf } from "./js/rows.js";
import { firstAfter, inTurn, Run, row, sliceAt } from "./js/run.js";
import { inkOn } from "./js/theme.js";
import { ticks } from "./js/ticks.js";
import { amount, duration, moment, whole } from "./js/units.js";
import { firstView, Viewport } from "./js/viewport.js";

/** A link that fetches for 30 and 50 ns, and a GPU that computes for 20 ns when both are there. */
function example(shift = 0) {
  return new Run({
    title: "",
    shift,
    start: 0,
    end: 100,
    lanes: [{ rank: 0, name: "link" }, { rank: 0, name: "gpu" }],
    slices: {
      id: Int32Array.of(0, 1, 2),
      start: Float64Array.of(0, 30, 80),
      duration: Float64Array.of(30, 50, 20),
      lane: Uint16Array.of(0, 0, 1),
      task: Uint32Array.of(0, 0, 1),
      step: Int32Array.of(-1, 0, 3),
      line: Uint32Array.of(0, 0, 1),
      state: Uint8Array.of(0, 0, 1),
      choice: Uint32Array.of(0, 0, 1),
    },
    cancelled: { time: Float64Array.of(20, 40), lane: Uint16Array.of(0, 0), task: Uint32Array.of(0, 0) },
    choices: ["", "E3: 2, E5: 1"],
    tasks: {
      label: ["fetch", "kernel"],
      verb: Uint16Array.of(0, 1),
      verbs: ["fetch", "kernel"],
      family: Uint8Array.of(2, 1),
      bytes: Float64Array.of(600, 0),
      flops: Float64Array.of(0, 8000),
      pages: Uint32Array.of(1, 0),
      page_names: ["L4 E7 #0", ""],
      rows: Uint32Array.of(0, 3),
      layer: Int32Array.of(4, 4),
      micro_batch: Int32Array.of(-1, 0),
      expert: Int32Array.of(7, -1),
    },
    edges: { count: Uint32Array.of(0, 0, 2), back: Int32Array.of(2, 1) },
    waits: {
      before: Int32Array.of(-1, 0, 1),
      why: Uint8Array.of(0, 3, 1),
      policy: Float64Array.of(0, 0, 0),
      host: Float64Array.of(0, 0, 0),
    },
    whys: ["start", "data", "room", "lane", "rank", "await"],
    states: ["done", "failed"],
    lines: ["", "/somewhere/policies/mine.py:12"],
    steps: [],
  });
}

test("times, sizes and numbers have three digits and a unit", () => {
  assert.deepEqual([0, 7, 1234, 56789, 2.5e9, 3e12].map(duration), ["0 ns", "7 ns", "1.23 µs", "56.8 µs", "2.5 s", "3,000 s"]);
  assert.deepEqual([999_400, 999_700, 99.97e6].map(duration), ["999 µs", "1 ms", "100 ms"]);
  assert.deepEqual([999, 999.7e6, 1.58e9, 64e12, 7.16e15].map((each) => amount(each, "B")), ["999 B", "1 GB", "1.58 GB", "64 TB", "7.16 PB"]);
  assert.equal(whole(1234567), "1,234,567");
  assert.equal(moment(9952721234, 73.4e6), "9.95272 s");
});

test("ticks are whole numbers of a unit, at most as many as asked for, and never equal", () => {
  for (const span of [60, 999, 12_345, 7e5, 3e8, 22e9, 5e12]) {
    for (const start of [0, 114_999_999_000, 3.3e12]) {
      const { marks, base } = ticks(start, start + span, 8);
      assert.ok(marks.length >= 2 && marks.length <= 9, `${marks.length} for ${span}`);
      assert.equal(new Set(marks.map((mark) => mark.label)).size, marks.length);
      for (const mark of marks) {
        assert.ok(mark.time >= start && mark.time <= start + span);
        assert.ok(mark.label.length <= 11, mark.label);
        const [number, unit] = mark.label.split(" ");
        const size = { s: 1e9, ms: 1e6, "µs": 1e3, ns: 1 }[unit];
        assert.ok(Math.abs(base + Number(number) * size - mark.time) < 1e-6 * size, `${mark.label} at ${mark.time}`);
      }
    }
  }
});

test("slices are found at a time, or near it", () => {
  const slices = row([0, 30, 80], [30, 50, 100], [0, 0, 0], Uint32Array.of(0, 1, 2));
  assert.deepEqual([-5, 0, 29, 30, 49, 50, 99, 100].map((time) => firstAfter(slices, time)), [0, 0, 0, 1, 1, 2, 2, 3]);
  assert.deepEqual([10, 30, 60, 51, 79, 103].map((time) => sliceAt(slices, time, 5)), [0, 1, -1, 1, 2, 2]);
});

test("wide slices are drawn as they are, and only as far as they are in view", () => {
  const slices = row([0, 30, 80], [30, 50, 100], [1, 2, 3], Uint32Array.of(0, 1, 2));
  const found = [];
  rectangles(slices, 20, 90, 70, (...each) => found.push(each));
  assert.deepEqual(found, [[0, 10, 1, 1, 0], [10, 30, 2, 1, 1], [60, 70, 3, 1, 2]]);
});

test("narrow slices are merged by pixel, with the family that takes most of it", () => {
  const starts = Array.from({ length: 1600 }, (_, index) => 8 * index);
  const ends = starts.map((start, index) => start + (index % 4 ? 7 : 2));
  const families = starts.map((_, index) => (index % 4 ? 5 : 1));
  const found = [];
  rectangles(row(starts, ends, families, Uint32Array.from(starts.keys())), 0, 12_800, 100, (...each) => found.push(each));
  assert.deepEqual(found, [[0, 100, 5, 0.75, -1]]);
});

test("merged and wide slices keep their order and their places", () => {
  const starts = [0, 4, 100, 300, 304];
  const ends = [2, 6, 200, 302, 306];
  const found = [];
  rectangles(row(starts, ends, [0, 0, 1, 2, 2], Uint32Array.of(0, 1, 2, 3, 4)), 0, 400, 40, (...each) => found.push(each));
  assert.deepEqual(found, [[0, 1, 0, 0.375, -1], [10, 20, 1, 1, 2], [30, 31, 2, 0.375, -1]]);
});

test("edges are known in both directions", () => {
  const run = example();
  assert.deepEqual([0, 1, 2].map((index) => [...run.producersOf(index)]), [[], [], [0, 1]]);
  assert.deepEqual([0, 1, 2].map((index) => [...run.consumersOf(index)]), [[2], [2], []]);
});

test("the critical path follows the waits back from the end", () => {
  assert.deepEqual([...example().path.order], [0, 1, 2]);
});

test("slices that overlap are shown in turn", () => {
  const found = inTurn(row([0, 5, 6, 30], [10, 20, 15, 40], [1, 2, 3, 4], Uint32Array.of(0, 1, 2, 3)));
  assert.deepEqual([[...found.order], [...found.starts], [...found.ends], [...found.families]], [[0, 1, 3], [0, 10, 30], [10, 20, 40], [1, 2, 4]]);
});

test("a shifted run has all its times shifted", () => {
  const run = example(1000);
  assert.deepEqual([run.start, run.end, run.starts[2], run.ends[2], run.lanes[1].slices.starts[0]], [1000, 1100, 1080, 1100, 1080]);
});

test("a task is told with its times, rates, place and line", () => {
  const run = example();
  assert.deepEqual(Object.fromEntries(describe(run, 1)), {
    lane: "link", starts: "0.000000030 s", takes: "50 ns", bytes: "600 B, 12 GB/s", pages: "1 (L4 E7 #0)", step: "prefill", layer: "4",
    expert: "7", "waited for": "fetch (the lane)",
  });
  assert.deepEqual(Object.fromEntries(describe(run, 2)), {
    lane: "gpu", starts: "0.000000080 s", takes: "20 ns", compute: "8 KFLOP, 400 GFLOP/s", rows: "3", "chosen experts and their rows": "E3: 2, E5: 1", step: "3", layer: "4",
    "micro-batch": "0", state: "failed", "waited for": "fetch (its data)", "submitted by": "policies/mine.py:12",
  });
  assert.deepEqual(Object.fromEntries(describeIdle(run, run.lanes[1], 2, 0)), {
    lane: "gpu", idle: "80 ns", until: "kernel", "which waited for": "fetch (its data)",
  });
});

test("a cancelled transfer is found near its time, on its lane", () => {
  const run = example(100);
  assert.deepEqual([run.cancelledAt(run.lanes[0], 118, 5), run.cancelledAt(run.lanes[0], 150, 5), run.cancelledAt(run.lanes[1], 120, 5)], [0, -1, -1]);
  assert.equal(run.labelOfCancelled(1), "fetch");
  assert.deepEqual(describeCancelled(run, 1), [["lane", "link"], ["cancelled", "before it started"], ["pages", "1 (L4 E7 #0)"]]);
});

test("a range tells how busy a lane was, and what it waited for", () => {
  const run = example();
  assert.deepEqual(useOf(run, run.lanes[1], 0, 100), { busy: 20, causes: [["data", 50], ["lane", 30]] });
  assert.deepEqual(useOf(run, run.lanes[1], 20, 90), { busy: 10, causes: [["data", 50], ["lane", 10]] });
  assert.deepEqual(useOf(run, run.lanes[0], 60, 100), { busy: 20, causes: [["finished", 20]] });
});

test("an empty range shows nothing", () => {
  const panel = { shown: ["a task"], replaceChildren: (...shown) => Object.assign(panel, { shown }) };
  showRange(panel, [example()], { start: 30, end: 30 });
  assert.deepEqual(panel.shown, []);
});

test("tasks are found by the words of their names, in order of time", () => {
  const run = example();
  run.data.tasks.label = ["fetch L3 E1", "kernel L30"];
  const finder = new Finder([run]);
  const found = (text) => {
    finder.search(text);
    return finder.places.map(({ index }) => index);
  };
  assert.deepEqual([found("FETCH"), found("l3"), found("l3 e2"), found("ker"), found(" ")], [[0, 1], [0, 1], [], [2], []]);
  finder.search("e");
  const path = [1, 1, 1, 1, -1].reduce((places, direction) => [...places, finder.next(places.at(-1), direction)], [null]);
  assert.deepEqual(path.slice(1).map(({ index }) => index), [0, 1, 2, 0, 2]);
  assert.equal(finder.next({ run, index: 1 }, -1).index, 0);
});

test("a row of a table leads to the longest task of its lane, kind and phase", () => {
  const run = example();
  const at = (columns, cells) => taskAt(run, placeOf(columns, cells));
  assert.equal(at(["lane", "most for"], ["link", "kernel on gpu"]), 1);
  assert.equal(at(["kind", "lane"], ["kernel", "gpu"]), 2);
  assert.equal(at(["", "kernel", "on", "phase"], ["1", "fetch", "somewhere", "prefill"]), 1);
  assert.equal(at(["lane", "until"], ["gpu", "kernel, step 3"]), 2);
  assert.equal(at(["", ""], ["kernel on gpu", "time"]), 2);
  assert.equal(at(["change"], ['link link x2']), 1);
  assert.equal(at(["", "measured"], ["throughput", "3"]), -1);
});

test("rows of several runs follow each other without overlap", () => {
  const { rows, height } = rowsOf([example(), example()], true);
  rows.slice(1).forEach((each, number) => assert.ok(each.y >= rows[number].y + rows[number].height));
  assert.deepEqual(rows.map((each) => each.kind), ["steps", "path", "lane", "lane", "steps", "path", "lane", "lane"]);
  assert.equal(rowAt(rows, height - 1), rows.at(-1));
  assert.equal(rowAt(rows, height + 1), null);
  assert.equal(rowsOf([example()], false).rows.length, 3);
});

test("a long loading is not in view at first", () => {
  const run = (loaded, end) => ({ start: 0, end, steps: [{ step: -1, start: 0, end: loaded }, { step: 0, start: loaded, end }] });
  assert.deepEqual(firstView([run(90, 100)]), [90, 100]);
  assert.deepEqual(firstView([run(5, 100)]), [0, 100]);
  assert.deepEqual(firstView([run(90, 100), run(80, 120)]), [80, 120]);
  assert.deepEqual(firstView([{ start: 0, end: 9, steps: [{ step: -1, start: 0, end: 9 }] }]), [0, 9]);
});

test("the viewport zooms around a place and stays within the run", () => {
  let changes = 0;
  const view = new Viewport(0, 1e9, () => changes++);
  const whole = view.span;
  view.zoom(0.5, 0.25);
  assert.ok(Math.abs(view.span - whole / 2) < 1);
  assert.ok(Math.abs(view.start - (view.first + whole / 8)) < 1);
  view.pan(-10);
  assert.equal(view.start, view.first);
  view.pan(10);
  assert.ok(Math.abs(view.end - view.last) < 1);
  for (let time = 0; time < 200; time++) view.zoom(0.5);
  assert.ok(view.span >= 50 - 1e-6);
  view.reveal(0, 10);
  assert.ok(view.start <= 0 && view.end >= 10);
  assert.ok(!view.isWhole);
  view.whole();
  assert.ok(view.isWhole);
  assert.deepEqual([view.start, view.end], [view.first, view.last]);
  assert.ok(changes > 200);
});

test("keys zoom, move and select", () => {
  const done = [];
  const timeline = {
    view: { pan: (share) => done.push(`pan ${Math.sign(share)}`), whole: () => done.push("whole") },
    zoom: (factor) => done.push(factor < 1 ? "in" : "out"),
    selectNext: (direction) => done.push(`next ${direction}`),
    selectLane: (direction) => done.push(`lane ${direction}`),
    leave: () => done.push("leave"),
  };
  for (const [key, shift] of [["+", false], ["+", true], ["S", false], ["ArrowLeft", false], ["ArrowLeft", true], ["ArrowDown", true], ["Home", false], ["Escape", false]]) {
    assert.ok(press(timeline, key, shift));
  }
  assert.ok(!press(timeline, "Tab"));
  assert.deepEqual(done, ["in", "in", "out", "pan -1", "next -1", "lane 1", "whole", "leave"]);
});

test("columns are found behind the text of a buffer", () => {
  const text = '{"a":{"column":"f64","at":0,"length":2},"b":["column"],"c":[{"column":"u8","at":16,"length":3}]}';
  const padded = text + " ".repeat((8 - ((4 + text.length) % 8)) % 8);
  const buffer = new ArrayBuffer(4 + padded.length + 24);
  new DataView(buffer).setUint32(0, padded.length, true);
  new Uint8Array(buffer, 4).set(new TextEncoder().encode(padded));
  new Float64Array(buffer, 4 + padded.length, 2).set([1.5, -2]);
  new Uint8Array(buffer, 4 + padded.length + 16, 3).set([7, 8, 9]);
  const { a, b, c } = revive(buffer);
  assert.deepEqual([[...a], b, [...c[0]]], [[1.5, -2], ["column"], [7, 8, 9]]);
});

test("the ink is readable on every colour", () => {
  assert.deepEqual(["#0072B2", "#F0E442", "#000000", "#ffffff"].map(inkOn), ["#ffffff", "#000000", "#ffffff", "#000000"]);
});

test("a curve has the value of the last sample before", () => {
  assert.deepEqual([-1, 0, 5, 10, 99].map((time) => lastUpTo([0, 10], time)), [-1, 0, 0, 1, 1]);
});
