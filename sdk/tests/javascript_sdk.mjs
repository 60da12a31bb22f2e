// Tests of the JavaScript SDK under Node.js, with stand-ins for the interfaces of WASI.
// Run by the tests of platform/cli, or by hand: node --test sdk/tests/javascript_sdk.mjs

import assert from "node:assert/strict";
import { register } from "node:module";
import { test } from "node:test";

const sdk = new URL("../js/", import.meta.url);
const standIn = `data:text/javascript,
export const getEnvironment = () => [];
export class Fields {} export class IncomingBody {} export class OutgoingBody {}
export class OutgoingResponse {} export class ResponseOutparam {}`;
register(`data:text/javascript,
export function resolve(name, context, next) {
  if (name.startsWith("wasi:")) return { url: ${encodeURIComponent(JSON.stringify(standIn))}, shortCircuit: true };
  if (name === "mayfly") return { url: "${sdk}index.js", shortCircuit: true };
  return next(name, context);
}`);
const { failure, find } = await import(`${sdk}adapter.js`);
const { log } = await import(`${sdk}index.js`);

/** What a function writes to a method of the console. */
function written(method, work) {
  const lines = [];
  const before = console[method];
  console[method] = (line) => lines.push(line);
  try {
    const result = work();
    return { result, lines };
  } finally {
    console[method] = before;
  }
}

async function failed(thrown) {
  const { result, lines } = written("error", () => failure(thrown));
  return { status: result.status, body: await result.json(), log: lines.join("\n") };
}

test("the log has the causes of an error", async () => {
  const cause = new TypeError("no name", { cause: "a text" });
  const { body, log } = await failed(new Error("no greeting", { cause }));
  assert.deepEqual(body, { errorType: "Error", errorMessage: "no greeting" });
  assert.match(log, /^Error: no greeting\nCaused by: TypeError: no name\nCaused by: a text$/);
});

test("the log has the errors that an error collects, and ends", async () => {
  const several = new AggregateError([new RangeError("one"), 2], "all failed");
  const { log } = await failed(several);
  assert.match(log, /AggregateError: all failed\nOne of its errors: RangeError: one\nOne of its errors: 2/);
  const endless = new Error("again");
  endless.cause = endless;
  assert.equal((await failed(endless)).log.match(/again/g).length, 8);
});

test("any thrown value is a response", async () => {
  const cyclic = {};
  cyclic.cyclic = cyclic;
  for (const [thrown, message] of [
    [undefined, "undefined"],
    [null, "null"],
    ["text", "text"],
    [7n, "7"],
    [Symbol("s"), "Symbol(s)"],
    [{ a: 1 }, '{"a":1}'],
    [{ message: "m" }, "m"],
    [Object.create(null), "{}"],
    [cyclic, "[object without a text]"],
    [Object.assign(new Error("e"), { stack: 7, status: 409 }), "e"],
  ]) {
    const { status, body } = await failed(thrown);
    assert.equal(body.errorMessage, message);
    assert.equal(status, thrown?.status ?? 500);
  }
});

test("a line of the log is written whatever its fields are", () => {
  const cyclic = { name: "c" };
  cyclic.list = [cyclic, { cyclic }];
  const shared = { a: 1 };
  const error = new TypeError("no name", { cause: new Error("because") });
  error.code = 7;
  error.self = error;
  const fields = { big: 7n, cyclic, error, first: shared, second: shared };
  const { lines } = written("log", () => log.info("x", fields));
  assert.deepEqual(JSON.parse(lines[0]), {
    level: "info",
    message: "x",
    big: "7",
    cyclic: { name: "c", list: ["[Circular]", { cyclic: "[Circular]" }] },
    error: {
      name: "TypeError",
      message: "no name",
      code: 7,
      self: "[Circular]",
      cause: { name: "Error", message: "because" },
    },
    first: { a: 1 },
    second: { a: 1 },
  });
  const broken = { toJSON: () => { throw new Error("broken"); } };
  const { lines: [line] } = written("error", () => log.error("x", { broken }));
  const message = "a line of the log cannot be written";
  assert.deepEqual(JSON.parse(line), { level: "error", message, error: "broken" });
});

test("handlers of every form are found", () => {
  const handle = () => 1;
  for (const [module, name, takesRequest] of [
    [{ handle }, "handle", false],
    [{ fetch: handle }, "handle", true],
    [{ default: { fetch: handle } }, "handle", true],
    [{ default: { handle } }, "handle", false],
    [{ default: handle }, "handle", false],
    [{ default: handle }, "default", false],
    [{ main: handle }, "main", false],
  ]) {
    assert.equal(find(module, name, "handler.js").takesRequest, takesRequest);
  }
  assert.throws(() => find({ main: handle }, "handle", "handler.js"), /neither handle.* it exports main/);
});
