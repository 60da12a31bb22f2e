//! Middleware that `mayfly deploy` links in front of a handler.

use anyhow::{Result, ensure};
use http::Method;
use mayfly_e2e::{Up, full, guest_or_skip, skipped, test_name};

use super::languages::{deploy_or_skip, deployed};

#[tokio::test(flavor = "multi_thread")]
async fn middleware_takes_a_request_before_the_handler() -> Result<()> {
    guest_or_skip!("hello");
    let middleware = guest_or_skip!("require-token");
    let middleware = middleware.to_string_lossy();
    let up = Up::start().await?;
    up.deploy("hello", "hello", &["--middleware", &middleware, "--env", "TOKEN=secret"]).await?;

    let http = up.http();
    let answer = http.get("/fn/default/hello/").await?;
    ensure!(answer.status == 401 && answer.header("www-authenticate") == "Bearer", "{answer:?}");
    for (token, status) in [("Bearer wrong", 401), ("Bearer secret", 200)] {
        let request = http.request(Method::GET, "/fn/default/hello/").header("authorization", token);
        let answer = http.call(request, full("")).await?;
        ensure!(answer.status == status, "{token}: {answer:?}");
        ensure!((answer.text() == "Hello from Mayfly!\n") == (status == 200), "{token}: {answer:?}");
    }

    // The middleware is part of the component: the same handler without it answers all clients.
    up.deploy("hello", "open", &[]).await?;
    let answer = up.http().get("/fn/default/open/").await?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

/// The middleware is built for a later patch version of wasi:http than scripts are.
async fn is_guarded(up: &Up, function: &str) -> Result<()> {
    let http = up.http();
    let path = format!("/fn/default/{function}/");
    for (token, status) in [("Bearer wrong", 401), ("Bearer secret", 200)] {
        let request = http.request(Method::POST, &path).header("authorization", token);
        let answer = http.call(request, full(r#"{"name": "Ada"}"#)).await?;
        ensure!(answer.status == status, "{function}, {token}: {answer:?}");
        ensure!((answer.text() == r#""hello, Ada""#) == (status == 200), "{function}, {token}: {answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn middleware_is_linked_in_front_of_a_function_of_python() -> Result<()> {
    let middleware = guest_or_skip!("require-token");
    let middleware = middleware.to_string_lossy();
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("greet.py");
    std::fs::write(&script, "def handle(event):\n    return f\"hello, {event['name']}\"\n")?;
    let up = Up::start().await?;
    deploy_or_skip!(up, script, &["--middleware", &middleware, "--env", "TOKEN=secret"]);
    is_guarded(&up, "greet").await
}

#[tokio::test(flavor = "multi_thread")]
async fn middleware_is_linked_in_front_of_a_function_of_javascript() -> Result<()> {
    let middleware = guest_or_skip!("require-token");
    let middleware = middleware.to_string_lossy();
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("greet.js");
    std::fs::write(&script, "export const handle = ({ name }) => `hello, ${name}`;\n")?;
    let up = Up::start().await?;
    deploy_or_skip!(up, script, &["--middleware", &middleware, "--env", "TOKEN=secret"]);
    is_guarded(&up, "greet").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_that_passes_nothing_on_is_no_middleware() -> Result<()> {
    let hello = guest_or_skip!("hello");
    let hello = hello.to_string_lossy();
    let up = Up::start().await?;
    let said = up.cli().fails(&["deploy", &hello, "--middleware", &hello]).await?;
    ensure!(said.contains("is not middleware"), "{said}");
    let said = up.cli().fails(&["deploy", "--image", "app:1", "--middleware", &hello]).await?;
    ensure!(said.contains("not to an image"), "{said}");
    Ok(())
}
