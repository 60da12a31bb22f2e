//! Functions in Python, JavaScript and TypeScript, built by the real toolchains from their registries.

use std::{collections::HashSet, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{CliOutput, CompleteResponse, Up, full, skipped, test_name, wait::until};
use serde_json::{Value, json};

use super::workflows::{ended, start};

/// A first build downloads hundreds of megabytes, and every build starts an interpreter next to other tests.
pub(super) const BUILD_TIMEOUT: Duration = Duration::from_secs(540);

/// Messages of an unavailable toolchain: a program is missing, or a registry cannot be reached. (The packages that the
/// tests install exist, so that an installation fails only without their registry.)
const UNAVAILABLE: [&str; 6] =
    ["is not there", "are not there", "has no pip", "cannot fetch", "npm cannot install", "pip cannot reach"];

/// The codes of npm's errors when it does not reach its registry.
const NPM_OFFLINE: [&str; 5] = ["ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT"];

/// The first line of an error that has one of these texts.
fn reason(errors: &str, texts: &[&str]) -> Option<String> {
    errors.lines().find(|line| texts.iter().any(|text| line.contains(text))).map(str::to_owned)
}

/// Runs a command that may build.
async fn run(up: &Up, arguments: &[&str]) -> Result<CliOutput> {
    let output = tokio::time::timeout(BUILD_TIMEOUT, up.cli().command(arguments)?.output());
    let output = output.await.with_context(|| format!("mayfly {arguments:?} did not end"))??;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(CliOutput { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) })
}

/// Deploys a script; returns the reason if its toolchain is unavailable.
pub(super) async fn deployed(up: &Up, script: &Path, flags: &[&str]) -> Result<Option<String>> {
    let script = script.to_string_lossy();
    let finished = run(up, &[&["deploy", &*script, "--wait-timeout", "300s"], flags].concat()).await?;
    if finished.code == Some(0) {
        return Ok(None);
    }
    let reason = reason(&finished.stderr, &UNAVAILABLE);
    Ok(Some(reason.with_context(|| format!("{script} was not deployed: {finished:?}"))?))
}

macro_rules! deploy_or_skip {
    ($up:expr, $script:expr, $flags:expr) => {
        if let Some(reason) = deployed(&$up, &$script, $flags).await? {
            skipped(test_name!(), &reason);
            return Ok(());
        }
    };
}

pub(super) use deploy_or_skip;

async fn call(up: &Up, function: &str, event: &str) -> Result<CompleteResponse> {
    let http = up.http();
    let request = http.request(Method::POST, &format!("/fn/default/{function}/"));
    http.call(request, full(event.to_owned())).await
}

/// Checks that the response is an error of this type and status.
#[track_caller]
fn check_error(answer: &CompleteResponse, status: u16, error_type: &str, message: &str) -> Result<()> {
    let body = answer.json()?;
    ensure!(answer.status == status && body["errorType"] == error_type, "{answer:?}");
    ensure!(body["errorMessage"].as_str().is_some_and(|said| said.contains(message)), "{answer:?}");
    Ok(())
}

async fn log_has(up: &Up, function: &str, parts: &[&str]) -> Result<()> {
    until("the log has what the function wrote", || async {
        let log = up.cli().ok(&["logs", function]).await?;
        Ok(parts.iter().all(|part| log.contains(part)).then_some(()))
    })
    .await
}

const PYTHON: &str = r#"import logging
import os

from mayfly import Request, Response, fetch


class SoldOut(Exception):
    status = 409


def deeper(n):
    return deeper(n + 1)


async def handle(event):
    import decimal
    match event.get("do"):
        case "raise":
            raise SoldOut("nothing left")
        case "recurse":
            return deeper(0)
        case "set":
            return {1}
        case "spin":
            while True:
                pass
        case "grow":
            kept = []
            while True:
                kept.append(bytearray(1 << 20))
        case "fetch":
            return fetch(event["url"]).text()
        case "wait":
            import asyncio
            left = asyncio.create_task(asyncio.sleep(60), name="left")
            return await asyncio.wait_for(asyncio.sleep(0.01, left.get_name()), 60)
        case "half":
            raise ValueError("\ud800")
    logging.info("greeting", extra={"person": event["name"]})
    return {"message": f"hello, {event['name']}", "greeting": os.environ["GREETING"], "half": str(decimal.Decimal("0.5"))}


def web(request: Request):
    if request.path == "/status":
        return Response("never sent", 99)
    if request.path == "/header":
        return Response("never sent", 200, {"x-name": "\u20ac"})
    return Response((f"{request.method} {n}\n".encode() for n in range(3)), 201, {"x-path": request.path})
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_python_is_a_function() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("handler.py");
    let up = Up::start().await?;

    std::fs::write(&script, PYTHON)?;
    deploy_or_skip!(up, script, &["--env", "GREETING=hi", "--timeout", "5s"]);
    let answer = call(&up, "handler", r#"{"name": "Ada é"}"#).await?;
    ensure!(
        answer.json()? == json!({"message": "hello, Ada é", "greeting": "hi", "half": "0.5"}),
        "{answer:?}"
    );
    let invoked = up.cli().ok(&["invoke", "handler", "-d", r#"{"name":"Ada"}"#]).await?;
    ensure!(invoked.contains("hello, Ada"), "{invoked}");

    check_error(&call(&up, "handler", r#"{"do": "raise"}"#).await?, 409, "SoldOut", "nothing left")?;
    check_error(&call(&up, "handler", r#"{"do": "recurse"}"#).await?, 500, "RecursionError", "recursion")?;
    check_error(&call(&up, "handler", r#"{"do": "set"}"#).await?, 500, "InvalidResult", "set")?;
    check_error(&call(&up, "handler", r#"{"do": "grow"}"#).await?, 500, "MemoryError", "")?;
    check_error(&call(&up, "handler", "{").await?, 400, "BadRequest", "not JSON")?;
    // Neither the timeout nor the task that is left behind is waited for.
    let waited = call(&up, "handler", r#"{"do": "wait"}"#).await?;
    ensure!(waited.status == 200 && waited.text() == "\"left\"", "{waited:?}");
    let half = call(&up, "handler", r#"{"do": "half"}"#).await?;
    ensure!(half.status == 500 && half.text().contains(r"\ud800"), "{half:?}");
    let denied = call(&up, "handler", r#"{"do": "fetch", "url": "http://example.com/"}"#).await?;
    check_error(&denied, 502, "Denied", "egress")?;
    let get = up.http().get("/fn/default/handler/").await?;
    check_error(&get, 405, "MethodNotAllowed", "POST")?;
    ensure!(call(&up, "handler", r#"{"do": "spin"}"#).await?.status == 504);
    let traceback =
        ["File \"handler.py\", line 19, in handle", "raise SoldOut(\"nothing left\")", "\"person\": \"Ada\""];
    log_has(&up, "handler", &traceback).await?;

    // Another handler of the same file, over HTTP.
    let web = format!("{}:web", script.display());
    ensure!(deployed(&up, Path::new(&web), &["--name", "web"]).await?.is_none());
    let answer = up.http().get("/fn/default/web/a/b").await?;
    ensure!(answer.status == 201 && answer.text() == "GET 0\nGET 1\nGET 2\n", "{answer:?}");

    // A path may begin with two slashes.
    let answer = up.http().get("/fn/default/web//[").await?;
    ensure!(answer.status == 201 && answer.header("x-path").ends_with("/["), "{answer:?}");
    // A response that cannot be sent is an error with its reason.
    for path in ["status", "header"] {
        let answer = up.http().get(&format!("/fn/default/web/{path}")).await?;
        check_error(&answer, 500, "InvalidResult", "is not allowed")?;
    }

    // Errors of the file contain the line; the running version is unchanged.
    for (source, expected) in [
        ("def handle(event):\n    return {\n", &["File \"handler.py\", line 2", "SyntaxError"][..]),
        ("x = 1\nundefined.name()\n", &["File \"handler.py\", line 2", "NameError"]),
        ("import numpy\ndef handle(event): pass\n", &["No module named 'numpy'"]),
        ("def main(event): pass\n", &["handler.py has no function 'handle'; it has main"]),
    ] {
        std::fs::write(&script, source)?;
        let refused = run(&up, &["deploy", &script.to_string_lossy()]).await?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(expected.iter().all(|part| refused.stderr.contains(part)), "{refused:?}");
        ensure!(
            !refused.stderr.contains("stack backtrace") && !refused.stderr.contains("_adapter.py"),
            "{refused:?}"
        );
    }
    ensure!(call(&up, "handler", r#"{"name": "Ada"}"#).await?.status == 200);
    Ok(())
}

const TYPESCRIPT: &str = r#"import { FunctionError, env, log } from "mayfly";

interface Event { name?: string; do?: string; url?: string }

const drawn = Math.random();

function deeper(n: number): number { return deeper(n + 1) + 1; }

export async function handle(event: Event): Promise<unknown> {
  switch (event.do) {
    case "raise": throw new FunctionError("SoldOut", "nothing left", 409);
    case "recurse": return deeper(0);
    case "function": return () => 1;
    case "random": return { drawn, next: Math.random() };
    case "missing": return (event as any).a.b;
    case "spin": for (;;);
    case "grow": for (const kept: Uint8Array[] = [];;) kept.push(new Uint8Array(1 << 20).fill(1));
    case "fetch": return (await fetch(event.url!)).text();
  }
  log.info("greeting", { name: event.name });
  return { message: `hello, ${event.name}`, greeting: env.GREETING };
}

export function web(): number { return 7; }
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_typescript_or_javascript_is_a_function() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("handler.ts");
    let up = Up::start().await?;

    std::fs::write(&script, TYPESCRIPT)?;
    deploy_or_skip!(up, script, &["--env", "GREETING=hi", "--timeout", "5s"]);
    let answer = call(&up, "handler", r#"{"name": "Ada é"}"#).await?;
    ensure!(answer.json()? == json!({"message": "hello, Ada é", "greeting": "hi"}), "{answer:?}");
    check_error(&call(&up, "handler", r#"{"do": "raise"}"#).await?, 409, "SoldOut", "nothing left")?;
    check_error(&call(&up, "handler", r#"{"do": "recurse"}"#).await?, 500, "InternalError", "recursion")?;
    check_error(&call(&up, "handler", r#"{"do": "function"}"#).await?, 500, "InvalidResult", "function")?;
    check_error(&call(&up, "handler", r#"{"do": "grow"}"#).await?, 500, "Error", "out of memory")?;
    check_error(&call(&up, "handler", r#"{"do": "missing"}"#).await?, 500, "TypeError", "undefined")?;
    check_error(&call(&up, "handler", "{").await?, 400, "BadRequest", "not JSON")?;
    check_error(&up.http().get("/fn/default/handler/").await?, 405, "MethodNotAllowed", "POST")?;
    // The random numbers of a call are its own, although the module drew one while it was loaded.
    let (mut drawn, mut next) = (HashSet::new(), HashSet::new());
    for _ in 0..10 {
        let answer = call(&up, "handler", r#"{"do": "random"}"#).await?.json()?;
        drawn.insert(answer["drawn"].to_string());
        next.insert(answer["next"].to_string());
    }
    ensure!((drawn.len(), next.len()) == (1, 10), "{drawn:?} {next:?}");
    ensure!(call(&up, "handler", r#"{"do": "spin"}"#).await?.status == 504);
    let denied = call(&up, "handler", r#"{"do": "fetch", "url": "http://example.com/"}"#).await?;
    ensure!(denied.status == 500, "{denied:?}");
    let lines = ["SoldOut: nothing left", "at handle (handler.ts:11:", "\"name\":\"Ada é\"", "spec.egress"];
    log_has(&up, "handler", &lines).await?;

    let other = folder.path().join("site.js");
    // A package may have the name of a module of Node.js.
    let events = folder.path().join("node_modules/events");
    std::fs::create_dir_all(&events)?;
    std::fs::write(events.join("package.json"), r#"{"name": "events", "main": "events.js"}"#)?;
    std::fs::write(events.join("events.js"), "exports.prefix = '';\n")?;
    let site = "import { prefix } from 'events';
    export default { fetch(request) {
        const path = new URL(request.url).pathname;
        const response = new Response(prefix + path, { status: 201 });
        return path === '/status' ? Object.defineProperty(response, 'status', { value: 99 }) : response;
    } };";
    std::fs::write(&other, site)?;
    ensure!(deployed(&up, &other, &[]).await?.is_none());
    let answer = up.http().get("/fn/default/site/a/b").await?;
    ensure!(answer.status == 201 && answer.text() == "/a/b", "{answer:?}");
    // A response that cannot be sent is an error with its reason.
    let answer = up.http().get("/fn/default/site/status").await?;
    check_error(&answer, 500, "InvalidResult", "is not allowed")?;

    // A package with native code, and modules that only Node.js has.
    let native = folder.path().join("node_modules/nativeadd");
    std::fs::create_dir_all(&native)?;
    std::fs::write(native.join("package.json"), r#"{"name": "nativeadd", "main": "add.node"}"#)?;
    std::fs::write(native.join("add.node"), "\u{7f}ELF")?;
    for (source, expected) in [
        ("export function handle(event) {\n  return {\n", &["handler.ts:3:0", "Expected"][..]),
        (
            "const x: number = 1;\nundefinedThing.foo();\n",
            &["undefinedThing is not defined", "at handler.ts:2:"],
        ),
        (
            "crypto.getRandomValues(new Uint8Array(1));\nexport const handle = () => 1;\n",
            &["handler.ts uses wasi:random/random", "while it is loaded"],
        ),
        ("export function main() {}\n", &["neither handle(event) nor fetch(request); it exports main"]),
        (
            "import fs from 'node:fs';\nexport const handle = () => fs;\n",
            &["node:fs is a module of Node.js", "handler.ts:1:"],
        ),
        (
            "import a from 'nativeadd';\nexport const handle = () => a;\n",
            &["the package nativeadd is native (add.node)"],
        ),
    ] {
        std::fs::write(&script, source)?;
        let refused = run(&up, &["deploy", &script.to_string_lossy()]).await?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(expected.iter().all(|part| refused.stderr.contains(part)), "{refused:?}");
    }
    ensure!(call(&up, "handler", r#"{"name": "Ada"}"#).await?.status == 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn packages_of_python_are_part_of_a_function_unless_they_are_native() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (script, requirements) = (folder.path().join("handler.py"), folder.path().join("requirements.txt"));
    let up = Up::start().await?;
    std::fs::write(
        &script,
        "import humanize\ndef handle(event):\n    return humanize.intcomma(event['n'])\n",
    )?;
    std::fs::write(&requirements, "humanize==4.9.0\n")?;
    deploy_or_skip!(up, script, &[]);
    let answer = call(&up, "handler", r#"{"n": 1234567}"#).await?;
    ensure!(answer.text() == "\"1,234,567\"", "{answer:?}");

    std::fs::write(&requirements, "humanize==4.9.0\nnumpy\n")?;
    let refused = run(&up, &["build", &script.to_string_lossy()]).await?;
    // The first requirement may be in pip's cache.
    if let Some(reason) = reason(&refused.stderr, &UNAVAILABLE) {
        skipped(test_name!(), &reason);
        return Ok(());
    }
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("numpy has no wheel in plain Python"),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn imports_within_functions_are_part_of_a_function_of_python() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let up = Up::start().await?;
    std::fs::create_dir(folder.path().join("shop"))?;
    for (name, source) in [
        (
            "handler.py",
            "def handle(event):\n    try:\n        import broken\n    except Exception:\n        pass\n    \
             import first\n    from shop import cart\n    return [first.second(), cart.total()]\n",
        ),
        // Its import fails, which must not fail the build.
        ("broken.py", "raise RuntimeError('not on this platform')\n"),
        ("first.py", "def second():\n    import second\n    return second.VALUE\n"),
        ("second.py", "VALUE = 2\n"),
        ("shop/__init__.py", ""),
        (
            "shop/cart.py",
            "def total():\n    from .prices import PRICE\n    from . import tax\n    return PRICE + tax.TAX\n",
        ),
        ("shop/prices.py", "PRICE = 10\n"),
        ("shop/tax.py", "TAX = 1\n"),
    ] {
        std::fs::write(folder.path().join(name), source)?;
    }
    let script = folder.path().join("handler.py");
    deploy_or_skip!(up, script, &[]);
    let answer = call(&up, "handler", "{}").await?;
    ensure!(answer.text() == "[2,11]", "{answer:?}");
    Ok(())
}

/// Writes a wheel in plain Python of 50 modules with a megabyte of text each, which does not compress well.
const LARGE_WHEEL: &str = r#"
import random, sys, zipfile
numbers = random.Random(1)
with zipfile.ZipFile(sys.argv[1], "w") as wheel:
    wheel.writestr("bigdata/__init__.py", "")
    for n in range(50):
        wheel.writestr(f"bigdata/part{n}.py", f"DATA = '{numbers.randbytes(500_000).hex()}'\n")
    info = "bigdata-1.0.dist-info"
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: bigdata\nVersion: 1.0\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "")
"#;

#[tokio::test(flavor = "multi_thread")]
async fn fifty_megabytes_of_packages_are_part_of_a_function() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [script, wheel] = ["handler.py", "bigdata-1.0-py3-none-any.whl"].map(|name| folder.path().join(name));
    let mut python = tokio::process::Command::new("python3");
    let made = python.args(["-c", LARGE_WHEEL]).arg(&wheel).output().await;
    if !made.as_ref().is_ok_and(|made| made.status.success()) {
        skipped(test_name!(), "no python3 to make a package");
        return Ok(());
    }
    let up = Up::start().await?;
    let source = "import bigdata.part7\ndef handle(event):\n    return len(bigdata.part7.DATA)\n";
    std::fs::write(&script, source)?;
    std::fs::write(folder.path().join("requirements.txt"), format!("{}\n", wheel.display()))?;
    deploy_or_skip!(up, script, &[]);
    let answer = call(&up, "handler", "{}").await?;
    ensure!(answer.text() == "1000000", "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_pass_their_own_tests_and_answer() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let up = Up::start().await?;
    // A project in TypeScript passes the compiler's checks as well.
    let typescript = "npm install --no-audit --no-fund && npm test && \
                      npm install --no-save --no-audit --no-fund typescript && npx tsc -p .";
    for (template, test) in [
        ("python", &["python3", "-m", "unittest"][..]),
        ("js", &["npm", "test"]),
        ("ts", &["sh", "-c", typescript]),
    ] {
        let project = folder.path().join(template);
        let name = format!("from-{template}");
        up.cli().ok(&["new", template, &name, "--dir", &project.to_string_lossy()]).await?;
        deploy_or_skip!(up, project, &[]);
        let tested =
            tokio::process::Command::new(test[0]).args(&test[1..]).current_dir(&project).output().await?;
        if let Some(reason) = reason(&String::from_utf8_lossy(&tested.stderr), &NPM_OFFLINE) {
            skipped(test_name!(), &reason);
            return Ok(());
        }
        ensure!(tested.status.success(), "{template}: {tested:?}");
        let answer = call(&up, &name, r#"{"name": "Ada"}"#).await?;
        ensure!(answer.json()? == json!({"message": "Hello, Ada!"}), "{answer:?}");
        check_error(&call(&up, &name, "{}").await?, 422, "NoName", "an event needs a name")?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workflow_has_a_step_in_each_language() -> Result<()> {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quote");
    // A copy, because a build writes next to the script.
    let folder = tempfile::tempdir()?;
    let up = Up::start().await?;
    for script in ["tax.py", "shipping.js", "total.ts"] {
        let copy = folder.path().join(script);
        std::fs::copy(example.join(script), &copy)?;
        deploy_or_skip!(up, copy, &[]);
    }
    up.cli().ok(&["apply", "-f", &example.join("workflow.yaml").to_string_lossy()]).await?;
    until("the workflow is ready", || async {
        let workflow = up.cli().get("workflow", "quote").await?;
        let conditions = workflow["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True").then_some(()))
    })
    .await?;
    let machine = "arn:aws:states:us-east-1:000000000000:stateMachine:quote";
    let quote = |country: &str, grams: u32| json!({"country": country, "netCents": 10_000, "grams": grams});
    for (input, error) in [
        (quote("DE", 700), None),
        (quote("XX", 700), Some("UnknownCountry")),
        (quote("FR", 9_000), Some("TooHeavy")),
    ] {
        let execution = start(&up, machine, input).await?;
        let told = ended(&up, &execution).await?;
        ensure!(told["error"].as_str() == error, "{told}");
        if error.is_none() {
            let output: Value = serde_json::from_str(told["output"].as_str().context("no output")?)?;
            ensure!(output == json!({"totalCents": 12_399, "text": "€ 123.99"}), "{told}");
        }
    }
    Ok(())
}
