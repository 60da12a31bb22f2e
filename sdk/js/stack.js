// Stack traces with the lines of the user's files: the bundle's source map is a global that the build appends.

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Infinite recursion has thousands of identical frames.
const FRAMES_MAX = 20;

/** Each frame of an engine's stack (`function@file:line:column`) as `    at function (source:line:column)`. Frames of
 * the adapter, and those that the map does not know, are left out. */
export function mapped(stack, map = globalThis.__mayflySourceMap) {
  const find = map ? finder(map) : () => undefined;
  const shown = [];
  for (const frame of stack.split("\n")) {
    const found = /^(.*)@.*?:(\d+):(\d+)$/.exec(frame.trim());
    const place = found && find(found[2], found[3]);
    if (place && shown.length === FRAMES_MAX) return [...shown, "    …"].join("\n");
    if (place) shown.push(`    at ${found[1] || "<anonymous>"} (${place})`);
  }
  return shown.join("\n");
}

/** From a line and a column of the bundle to `source:line:column`; undefined for what is not the user's. */
export function finder(map) {
  const lines = decoded(map.mappings);
  return (line, column) => {
    const source = position(lines[line - 1] ?? [], column - 1);
    const file = source && map.sources[source.file];
    if (file === undefined || file.startsWith("mayfly:")) return undefined;
    return `${file}:${source.line + 1}:${source.column + 1}`;
  };
}

function position(segments, column) {
  let found;
  for (const segment of segments) {
    if (segment.at > column) break;
    found = segment;
  }
  return found;
}

/** The segments of each line: base64 variable-length quantities, each relative to the previous one. */
export function decoded(mappings) {
  let [file, line, column] = [0, 0, 0];
  return mappings.split(";").map((text) => {
    let at = 0;
    const segments = [];
    for (const segment of text.split(",")) {
      const values = quantities(segment);
      if (values.length < 4) continue;
      at += values[0];
      file += values[1];
      line += values[2];
      column += values[3];
      segments.push({ at, file, line, column });
    }
    return segments;
  });
}

function quantities(text) {
  const values = [];
  let [value, shift] = [0, 0];
  for (const digit of text) {
    const bits = DIGITS.indexOf(digit);
    value += (bits & 31) << shift;
    shift += 5;
    if ((bits & 32) === 0) {
      values.push(value & 1 ? -(value >> 1) : value >> 1);
      [value, shift] = [0, 0];
    }
  }
  return values;
}
