//! Answers after `?ms=` milliseconds.

use std::time::Duration;

use mayfly::{Request, Response};

#[mayfly::http]
async fn sleep(request: Request) -> Response {
    let ms = request.query("ms").and_then(|text| text.parse().ok()).unwrap_or(1_000);
    mayfly::time::sleep(Duration::from_millis(ms)).await;
    Response::text(format!("slept {ms} ms\n"))
}
