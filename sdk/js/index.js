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
  const line = JSON.stringify({ level, message: String(message), ...fields });
  // console.log is stdout, console.error is stderr.
  (level === "debug" || level === "info" ? console.log : console.error)(line);
}

/** Structured log lines: one JSON object each. MAYFLY_LOG sets the lowest level that is written. */
export const log = {
  debug: (message, fields) => write("debug", message, fields),
  info: (message, fields) => write("info", message, fields),
  warn: (message, fields) => write("warn", message, fields),
  error: (message, fields) => write("error", message, fields),
};
