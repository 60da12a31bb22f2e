//! Functions without a public address: refused by the gateway, called through the API by users who may.

use anyhow::{Result, ensure};
use http::Method;
use mayfly_e2e::{Up, full, guest_or_skip};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn private_functions_are_invoked_through_the_api() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    up.apply_function("greet", &component, json!({"visibility": "private"})).await?;

    let http = up.http();
    let answer =
        http.call(http.request(Method::POST, "/fn/default/greet/"), full(r#"{"name":"Ada"}"#)).await?;
    ensure!(answer.status == 404, "{answer:?}");

    let cli = up.cli();
    let said = cli.ok(&["invoke", "greet", "-d", r#"{"name":"Ada"}"#]).await?;
    ensure!(said.contains("Hello, Ada!"), "{said}");
    // The function's own error is shown as for a public function.
    let said = cli.fails(&["invoke", "greet", "-d", "{}"]).await?;
    ensure!(said.contains("function greet answered 4"), "{said}");
    let id = cli.ok(&["invoke", "greet", "--async", "-d", r#"{"name":"Ada"}"#]).await?;
    let listed = cli.ok(&["invocations", "list", "-o", "json"]).await?;
    ensure!(listed.contains(id.trim()), "{id} is not in {listed}");
    let said = cli.fails(&["invoke", "none"]).await?;
    ensure!(said.contains("none") && said.contains("404"), "{said}");
    Ok(())
}
