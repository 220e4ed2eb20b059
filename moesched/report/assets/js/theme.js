// Colours of the page, light or dark, and the switch between them.

const STORED = "moesched theme";

/** The colours that the canvas needs, from the style sheet. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "raised", "ink", "quiet", "line", "accent", "selected", "path", "band", "found"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** A colour such as "#0072B2" laid over another, which shows through unless `cover` is 1. */
export function laidOver(colour, ground, cover) {
  const below = parts(ground);
  return `rgb(${parts(colour).map((part, at) => Math.round(cover * part + (1 - cover) * below[at]))})`;
}

function parts(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** Black or white, whichever is easier to read on a colour such as "#0072B2". */
export function inkOn(colour) {
  const [red, green, blue] = parts(colour).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

/** Let a select element switch the theme; `changed` is called after every change. */
export function switchTheme(select, changed) {
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    changed();
  };
  select.value = stored() ?? "";
  apply(select.value);
  select.addEventListener("change", () => {
    store(select.value);
    apply(select.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

// A page that is opened from a file may have no storage.
function stored() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null;
  }
}

function store(theme) {
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // the choice holds until the page is left
  }
}
