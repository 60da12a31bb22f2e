/**
 * Functions for Mayfly in JavaScript and TypeScript.
 *
 * `export function handle(event)` takes the decoded JSON of the request and returns a value that JSON can represent, or
 * a `Response`. `export function fetch(request)`, or `export default { fetch }`, takes a `Request` and returns a
 * `Response`, as on other platforms with web APIs. Both may be async. An exception becomes an error answer: its `name`
 * is the error's type, its `status` (400 to 599; 500 without one) the HTTP status.
 *
 * Outbound requests are the global `fetch`; they may go where the function's `egress` allows.
 */

/** Any value that JSON can represent. */
export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

/** The type of `export function handle`. The second parameter is the request that carried the event. */
export type EventHandler<In = any, Out = unknown> = (event: In, request: Request) => Out | Promise<Out>;

/** The type of `export function fetch`. */
export type HttpHandler = (request: Request) => Response | Promise<Response>;

/** The function's settings (`spec.env`). Available during requests; empty while the module is loaded. */
export const env: Record<string, string | undefined>;

/** An error response with a type and an HTTP status of the caller's choice (400 to 599). */
export class FunctionError extends Error {
  constructor(errorType: string, message?: string, status?: number);
  readonly errorType: string;
  readonly status: number;
}

type Write = (message: string, fields?: Record<string, unknown>) => void;

/** Structured log lines: one JSON object each. MAYFLY_LOG sets the lowest level that is written. */
export const log: { debug: Write; info: Write; warn: Write; error: Write };
