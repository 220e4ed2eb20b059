// Unpacks what moesched/report/packing.py packed.

const TYPES = { f64: Float64Array, i32: Int32Array, u32: Uint32Array, u16: Uint16Array, u8: Uint8Array };

/** The value in a packed text, with its columns as typed arrays. */
export async function unpack(text) {
  const letters = atob(text.trim());
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return revive(await new Response(stream).arrayBuffer());
}

/** The value in an unpacked buffer. */
export function revive(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const first = 4 + length;

  function revived(value) {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(revived) : value;
    if ("column" in value) return new TYPES[value.column](buffer, first + value.at, value.length);
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, revived(each)]));
  }

  return revived(JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length))));
}
