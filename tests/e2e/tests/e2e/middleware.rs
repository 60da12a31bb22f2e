//! Middleware that `mayfly deploy` links in front of a handler.

use anyhow::{Result, ensure};
use http::Method;
use mayfly_e2e::{Up, full, guest_or_skip};

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
