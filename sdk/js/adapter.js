// Connects a user's module to wasi:http/incoming-handler. It is bundled with the module; the engine's state after
// loading both is the snapshot from which every instance starts. The engine's own fetch event is not used, because an
// instance can receive it only once, which would prevent `isolation: reuse`.

import { getEnvironment } from "wasi:cli/environment@0.2.10";
import { Fields, IncomingBody, OutgoingBody, OutgoingResponse, ResponseOutparam } from "wasi:http/types@0.2.10";
import { env } from "mayfly";
import { loaded } from "./random.js";
import { mapped } from "./stack.js";

// The maximum size of one read or write: blocking-write-and-flush accepts 4096 bytes.
const READ_BYTES_MAX = 65536n;
const WRITE_BYTES_MAX = 4096;

/** Finds the handler in a module; returns the component's export. */
export function serve(module, name, file) {
  loaded();
  const { handler, takesRequest } = find(module, name, file);
  return {
    async handle(incoming, responseOut) {
      let request;
      try {
        request = requestOf(incoming);
      } catch (wrong) {
        // For example the method TRACE, which the web's Request rejects.
        const text = `the request cannot be represented: ${wrong?.message ?? wrong}`;
        return send(error("BadRequest", text, 400), responseOut);
      }
      await send(await answer(handler, takesRequest, request), responseOut);
    },
  };
}

/** Converts a request, with its whole body. */
function requestOf(incoming) {
  const method = incoming.method();
  const fields = incoming.headers();
  const headers = fields.entries().map(([name, value]) => [name, decoder.decode(value)]);
  fields[Symbol.dispose]();
  const url = `${schemeOf(incoming)}://${incoming.authority() ?? "localhost"}${incoming.pathWithQuery() ?? "/"}`;
  const options = { method: method.tag === "other" ? method.val : method.tag.toUpperCase(), headers };
  const bytes = read(incoming.consume());
  // The garbage collector would drop handles late: those of thousands of requests exceed the host's limit.
  incoming[Symbol.dispose]();
  if (options.method !== "GET" && options.method !== "HEAD") options.body = bytes;
  return new Request(url, options);
}

function schemeOf(incoming) {
  return incoming.scheme()?.tag === "HTTPS" ? "https" : "http";
}

const decoder = new TextDecoder();
const encoder = new TextEncoder();

function read(body) {
  const stream = body.stream();
  const chunks = [];
  for (;;) {
    try {
      chunks.push(stream.blockingRead(READ_BYTES_MAX));
    } catch (ended) {
      if ((ended.payload ?? ended).tag === "closed") break;
      throw new Error("the body broke off");
    }
  }
  stream[Symbol.dispose]();
  IncomingBody.finish(body)[Symbol.dispose]();
  const whole = new Uint8Array(chunks.reduce((length, chunk) => length + chunk.length, 0));
  let at = 0;
  for (const chunk of chunks) {
    whole.set(chunk, at);
    at += chunk.length;
  }
  return whole;
}

/** Sends a response, and streams its body. */
async function send(response, responseOut) {
  let outgoing;
  try {
    outgoing = outgoingOf(response);
  } catch (wrong) {
    const reason = (wrong?.payload ?? wrong)?.tag ?? wrong;
    const text = `the response's status ${response.status} or a header is not allowed: ${reason}`;
    console.error(text);
    response = error("InvalidResult", text, 500);
    outgoing = outgoingOf(response);
  }
  const body = outgoing.body();
  ResponseOutparam.set(responseOut, { tag: "ok", val: outgoing });
  const stream = body.write();
  try {
    const reader = response.body?.getReader();
    for (;;) {
      const { done, value } = reader ? await reader.read() : { done: true };
      if (done) break;
      for (let at = 0; at < value.length; at += WRITE_BYTES_MAX) {
        stream.blockingWriteAndFlush(value.subarray(at, at + WRITE_BYTES_MAX));
      }
    }
  } catch (failed) {
    // The status is already sent: dropping the unfinished body tells the client that it is incomplete.
    console.error(`the response was aborted: ${failed?.message ?? failed}`);
    stream[Symbol.dispose]();
    body[Symbol.dispose]();
    return;
  }
  stream[Symbol.dispose]();
  OutgoingBody.finish(body, undefined);
}

/** The response without its body; throws if a header or the status is not allowed. */
function outgoingOf(response) {
  const headers = [...response.headers].map(([name, value]) => [name, encoder.encode(value)]);
  const outgoing = new OutgoingResponse(Fields.fromList(headers));
  outgoing.setStatusCode(response.status);
  return outgoing;
}

export function find(module, name, file) {
  const main = module.default;
  const candidates = [
    [module[name], name === "fetch"],
    ...(name === "handle"
      ? [[module.fetch, true], [main?.fetch?.bind?.(main), true], [main?.handle?.bind?.(main), false], [main, false]]
      : []),
  ];
  const found = candidates.find(([value]) => typeof value === "function");
  if (found) return { handler: found[0], takesRequest: found[1] };
  const known = Object.keys(module).filter((key) => typeof module[key] === "function");
  const has = known.length > 0 ? `; it exports ${known.join(", ")}` : "";
  const wanted = name === "handle" ? "neither handle(event) nor fetch(request)" : `no function ${name}`;
  throw new Error(`${file} exports ${wanted}${has}`);
}

let started = false;

/** Replaces the environment of the build, at the first request. */
function start() {
  started = true;
  for (const name of Object.keys(env)) delete env[name];
  for (const [name, value] of getEnvironment()) env[name] = value;
}

async function answer(handler, takesRequest, request) {
  if (!started) start();
  try {
    if (takesRequest) return response(await handler(request), true);
    if (request.method !== "POST") {
      return error("MethodNotAllowed", "send the event as JSON by POST", 405, { allow: "POST" });
    }
    const text = await request.text();
    let event;
    try {
      event = text === "" ? {} : JSON.parse(text);
    } catch (wrong) {
      return error("BadRequest", `the event is not JSON: ${wrong.message}`, 400);
    }
    return response(await handler(event, request), false);
  } catch (failed) {
    return failure(failed);
  }
}

function response(result, takesRequest) {
  if (result instanceof Response) return result;
  if (takesRequest && result === undefined) return new Response(null, { status: 204 });
  if (takesRequest && typeof result === "string") return new Response(result);
  let text;
  try {
    text = JSON.stringify(result ?? null);
  } catch (wrong) {
    return error("InvalidResult", `the handler's result cannot be written as JSON: ${wrong.message}`, 500);
  }
  if (text === undefined) {
    return error("InvalidResult", `the handler's result is a ${typeof result}, which JSON cannot represent`, 500);
  }
  return new Response(text, { headers: { "content-type": "application/json" } });
}

function error(errorType, errorMessage, status, headers = {}) {
  const body = JSON.stringify({ errorType, errorMessage });
  return new Response(body, { status, headers: { "content-type": "application/json", ...headers } });
}

// Errors that the log shows for one exception: itself, its causes and the errors that it collects.
const ERRORS_MAX = 8;

/** The response for an exception; its stack, with the lines of the user's files, goes to the log. */
export function failure(failed) {
  console.error(described(failed));
  if (!(failed instanceof Error)) return error("Error", printed(failed?.message ?? failed), 500);
  const status = Number.isInteger(failed.status) && failed.status >= 400 && failed.status <= 599 ? failed.status : 500;
  return error(typeOf(failed), printed(failed.message), status);
}

function typeOf(failed) {
  const named = failed.errorType ?? (failed.name !== "Error" ? failed.name : failed.constructor?.name);
  return printed(named ?? "Error");
}

/** A thrown value, and the causes of an error. */
function described(failed) {
  const shown = [];
  const next = [[failed instanceof Error ? "" : "Uncaught ", failed]];
  while (next.length > 0 && shown.length < ERRORS_MAX) {
    const [prefix, thrown] = next.shift();
    if (!(thrown instanceof Error)) {
      shown.push(prefix + printed(thrown));
      continue;
    }
    const stack = mapped(printed(thrown.stack ?? ""));
    shown.push(`${prefix}${typeOf(thrown)}: ${printed(thrown.message)}\n${stack}`.trimEnd());
    if (thrown.cause !== undefined) next.push(["Caused by: ", thrown.cause]);
    if (Array.isArray(thrown.errors)) next.push(...thrown.errors.map((inner) => ["One of its errors: ", inner]));
  }
  return shown.join("\n");
}

/** A text for any value. */
function printed(value) {
  try {
    return (typeof value === "object" ? JSON.stringify(value) : undefined) ?? String(value);
  } catch {
    return `[${typeof value} without a text]`;
  }
}
