// Elements of the page. Text never becomes markup.

/** A new element with a text and children. */
export function make(name, text = "", ...children) {
  const element = document.createElement(name);
  element.textContent = text;
  element.append(...children);
  return element;
}

/** A short line of a colour. */
export function swatch(colour) {
  const element = make("i");
  element.className = "swatch";
  element.style.backgroundColor = colour;
  return element;
}
