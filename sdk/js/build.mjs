// Builds a component from a module: bundles it with the adapter (types are removed, not checked), then lets the engine
// load the bundle. Runs under Node.js in the folder of the toolchain. Its argument is a JSON object:
//   { source, handler, sdk, wit, world, out }
// Errors in the user's files go to stderr with their position, and the exit status is 1.

import { builtinModules } from "node:module";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, dirname, join, relative, resolve } from "node:path";
import * as esbuild from "esbuild";
import { componentize } from "@bytecodealliance/componentize-js";
import { finder } from "./stack.mjs";

// A larger source map would take a large part of every instance's memory; stacks then have no source lines.
const SOURCE_MAP_BYTES_MAX = 1 << 20;

const job = JSON.parse(process.argv[2]);
const folder = dirname(job.source);
const builtin = new Set([...builtinModules, ...builtinModules.map((name) => `node:${name}`)]);

function packageOf(path) {
  const parts = path.split("node_modules/").pop().split("/");
  return parts[0].startsWith("@") ? parts.slice(0, 2).join("/") : parts[0];
}

// Marks a resolution of this plugin's own, which it must not handle again.
const OWN_RESOLUTION = Symbol("own resolution");

/** Explains why an import cannot work, which esbuild's own message does not. */
const refusals = {
  name: "refusals",
  setup(build) {
    build.onResolve({ filter: /.*/ }, async ({ path, resolveDir, importer, kind, pluginData }) => {
      if (!builtin.has(path) || resolveDir === job.sdk || pluginData === OWN_RESOLUTION) return;
      if (!path.startsWith("node:")) {
        // An installed package may have the name of a module of Node.js: events, buffer, util.
        const found = await build.resolve(path, { resolveDir, importer, kind, pluginData: OWN_RESOLUTION });
        if (found.errors.length === 0 && !found.external) return found;
      }
      const text = `${path} is a module of Node.js: functions have the web's APIs (fetch, URL, crypto, streams)`;
      return { errors: [{ text }] };
    });
    build.onLoad({ filter: /\.node$/ }, ({ path }) => {
      return { errors: [{ text: `the package ${packageOf(path)} is native (${basename(path)}): only packages in plain \
JavaScript or WebAssembly text can be part of a function` }] };
    });
  },
};

async function bundle(work) {
  // Modules are loaded in the order of the imports.
  const entry = `import ${JSON.stringify(join(job.sdk, "random.js"))};
import * as user from ${JSON.stringify(job.source)};
import { serve } from ${JSON.stringify(join(job.sdk, "adapter.js"))};
export const incomingHandler = serve(user, ${JSON.stringify(job.handler)}, ${JSON.stringify(basename(job.source))});`;
  const result = await esbuild.build({
    stdin: { contents: entry, resolveDir: folder, sourcefile: "mayfly:entry" },
    outfile: join(work, "bundle.js"),
    bundle: true,
    format: "esm",
    platform: "neutral",
    mainFields: ["module", "main"],
    conditions: ["worker", "import", "module"],
    target: "es2022",
    external: ["wasi:*"],
    alias: { mayfly: join(job.sdk, "index.js") },
    define: { "process.env.NODE_ENV": '"production"' },
    plugins: [refusals],
    sourcemap: "external",
    sourcesContent: false,
    keepNames: true,
    write: false,
    absWorkingDir: folder,
    logLevel: "silent",
  });
  for (const line of await esbuild.formatMessages(result.warnings, { kind: "warning" })) console.error(line.trimEnd());
  const text = (suffix) => result.outputFiles.find((file) => file.path.endsWith(suffix)).text;
  const { sources, mappings } = JSON.parse(text(".map"));
  const named = sources.map((source) => {
    const path = resolve(work, source);
    return path.startsWith(job.sdk) || source.includes("mayfly:") ? `mayfly:${basename(path)}` : relative(folder, path);
  });
  const map = JSON.stringify({ sources: named, mappings });
  const script = join(work, "bundle.js");
  const appended = map.length <= SOURCE_MAP_BYTES_MAX ? `\nglobalThis.__mayflySourceMap = ${map};\n` : "";
  await writeFile(script, text(".js") + appended);
  return { script, map: { sources: named, mappings } };
}

/** The engine's report of an exception while the module was loaded: its first line, with the user's file and line. */
function loadError(message, map) {
  const missing = /unknown imported function: '([^']+)' '([^']+)'/.exec(message);
  if (missing) {
    return `${basename(job.source)} uses ${missing[1]} (${missing[2]}) while it is loaded: code at the top level of a \
module runs during the build, without random bytes, network and files; use them within the handler`;
  }
  const find = finder(map);
  const thrown = /bundle\.js:(\d+):(\d+) (.*)/.exec(message);
  if (!thrown) return message;
  const frames = [...message.matchAll(/bundle\.js:(\d+):(\d+)/g)].map(([, line, column]) => find(line, column));
  const place = frames.find((frame) => frame !== undefined);
  return place ? `${thrown[3]}\n    at ${place}` : thrown[3].replace(/^Error: /, "");
}

async function make(work) {
  const { script, map } = await bundle(work);
  try {
    const { component } = await componentize({
      sourcePath: script,
      witPath: job.wit,
      worldName: job.world,
      // The adapter exports the handler itself.
      disableFeatures: ["fetch-event"],
      // The snapshot must not contain the environment of the build.
      env: {},
    });
    await writeFile(job.out, component);
  } catch (failed) {
    throw new Error(loadError(failed.message, map));
  }
}

const work = await mkdtemp(join(tmpdir(), "mayfly-js-"));
try {
  await make(work);
} catch (failed) {
  const lines = failed.errors ? await esbuild.formatMessages(failed.errors, { kind: "error", color: false }) : [failed.message];
  console.error(lines.join("\n").trimEnd());
  process.exitCode = 1;
} finally {
  await rm(work, { recursive: true, force: true });
}
