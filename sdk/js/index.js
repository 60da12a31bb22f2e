// Functions for Mayfly in JavaScript. A handler needs none of this; index.d.ts describes it.

/** The function's settings: set when an instance starts; under Node.js the process's environment. */
globalThis.process ??= { env: {} };
export const env = globalThis.process.env;

/** An error response with a type and an HTTP status of the caller's choice (400 to 599). */
export class FunctionError extends Error {
  constructor(errorType, message = "", status = 500) {
    super(message);
    this.name = errorType;
    this.errorType = errorType;
    this.status = status;
  }
}

const LEVELS = ["debug", "info", "warn", "error", "off"];

function write(level, message, fields) {
  const least = LEVELS.indexOf(env.MAYFLY_LOG ?? "info");
  if (LEVELS.indexOf(level) < (least < 0 ? 1 : least)) return;
  let line;
  try {
    line = json({ level, message: String(message), ...fields });
  } catch (wrong) {
    // A getter or a toJSON of a field. What is logged must not end the request.
    line = JSON.stringify({ level, message: "a line of the log cannot be written", error: `${wrong?.message}` });
  }
  // console.log is stdout, console.error is stderr.
  (level === "debug" || level === "info" ? console.log : console.error)(line);
}

/** JSON.stringify, also for errors, BigInt, and objects that contain themselves. */
function json(value) {
  const plain = new Map();
  const ancestors = [];
  return JSON.stringify(value, function (_key, value) {
    if (typeof value === "bigint") return String(value);
    if (typeof value !== "object" || value === null) return value;
    if (value instanceof Error) value = fieldsOf(value, plain);
    // `this` is the object with the key: those after it are not around this value.
    while (ancestors.length > 0 && ancestors.at(-1) !== this) ancestors.pop();
    if (ancestors.includes(value)) return "[Circular]";
    ancestors.push(value);
    return value;
  });
}

/** The fields of an error, which JSON.stringify leaves out; one object for each error. */
function fieldsOf(error, plain) {
  if (!plain.has(error)) {
    const { name, message, cause } = error;
    plain.set(error, { name, message, ...error, ...(cause === undefined ? {} : { cause }) });
  }
  return plain.get(error);
}

/** Structured log lines: one JSON object each. MAYFLY_LOG sets the lowest level that is written. */
export const log = {
  debug: (message, fields) => write("debug", message, fields),
  info: (message, fields) => write("info", message, fields),
  warn: (message, fields) => write("warn", message, fields),
  error: (message, fields) => write("error", message, fields),
};
