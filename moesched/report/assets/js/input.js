// Wheel, drag and click on the lanes and the charts, and the keys of the timeline.

const WHEEL = 0.0016;
const STEP = 0.8;
const PAN = 0.15;
const CLICK = 4;

/** What a key without Shift does to a timeline. */
const KEYS = {
  "+": (timeline) => timeline.zoom(STEP),
  "=": (timeline) => timeline.zoom(STEP),
  w: (timeline) => timeline.zoom(STEP),
  ArrowUp: (timeline) => timeline.zoom(STEP),
  "-": (timeline) => timeline.zoom(1 / STEP),
  s: (timeline) => timeline.zoom(1 / STEP),
  ArrowDown: (timeline) => timeline.zoom(1 / STEP),
  ArrowLeft: (timeline) => timeline.view.pan(-PAN),
  a: (timeline) => timeline.view.pan(-PAN),
  ArrowRight: (timeline) => timeline.view.pan(PAN),
  d: (timeline) => timeline.view.pan(PAN),
  0: (timeline) => timeline.view.whole(),
  Home: (timeline) => timeline.view.whole(),
  c: (timeline) => timeline.togglePath(),
  Enter: (timeline) => timeline.zoomToSelected(),
  Escape: (timeline) => timeline.leave(),
};

const WITH_SHIFT = {
  ArrowLeft: (timeline) => timeline.selectNext(-1),
  ArrowRight: (timeline) => timeline.selectNext(1),
  ArrowUp: (timeline) => timeline.selectLane(-1),
  ArrowDown: (timeline) => timeline.selectLane(1),
};

/** Do what a key says; returns whether it says anything. */
export function press(timeline, key, shift = false) {
  const action = shift ? (WITH_SHIFT[key] ?? KEYS[key]) : KEYS[key.length === 1 ? key.toLowerCase() : key];
  action?.(timeline);
  return action !== undefined;
}

/** Listen to the keys while an element has the focus. */
export function listenToKeys(element, timeline) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(timeline, event.key, event.shiftKey)) event.preventDefault();
  });
}

/** Find what is typed into a field; `/` anywhere on the page goes there, and Esc leaves it. */
export function listenToFinder(field, lanes, timeline) {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
  field.addEventListener("input", () => timeline.find(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") timeline.findNext(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    field.value = "";
    timeline.find("");
    lanes.focus();
  });
}

/**
 * Zoom with the wheel and move by dragging, where times begin `offset()` pixels right of an element's edge.
 *
 * With `scrolls`, the wheel alone scrolls the page, and zooms with Ctrl.
 */
export function listenToPointer(element, timeline, offset, scrolls = false) {
  listenToWheel(element, timeline, offset, scrolls);
  let last = null;
  let moved = 0;
  let ranges = false;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    last = event;
    moved = 0;
    ranges = timeline.beginRange(event, element);
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    if (last) {
      moved += Math.abs(event.clientX - last.clientX) + Math.abs(event.clientY - last.clientY);
      if (moved > CLICK) {
        if (ranges) timeline.extendRange(event, element);
        else timeline.drag(event.clientX - last.clientX, event.clientY - last.clientY);
        last = event;
      }
    }
    timeline.hover(event, element);
  });
  element.addEventListener("pointerup", (event) => {
    if (last && moved <= CLICK) timeline.click(event, element);
    last = null;
    timeline.dragged(false);
  });
  element.addEventListener("pointercancel", () => {
    last = null;
    timeline.dragged(false);
  });
  element.addEventListener("pointerleave", () => timeline.hover(null));
}

function listenToWheel(element, timeline, offset, scrolls) {
  const turned = (event) => {
    const { view } = timeline;
    const box = element.getBoundingClientRect();
    const x = event.clientX - box.left - offset();
    const width = box.width - offset();
    const pixels = event.deltaMode === 1 ? 16 : 1;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) {
      view.pan(((event.deltaX || event.deltaY) * pixels) / width);
    } else {
      const leaves = x < 0 || (event.deltaY > 0 && view.isWhole) || (scrolls && !event.ctrlKey);
      if (leaves) return; // the page scrolls, or the lanes do
      view.zoom(Math.exp(event.deltaY * pixels * WHEEL), x / width);
    }
    event.preventDefault();
  };
  element.addEventListener("wheel", turned, { passive: false });
}
