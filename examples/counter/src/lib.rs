//! Counts its own calls. With `isolation: fresh` every call is the first; with `reuse` the instance and its count
//! survive calls.

use std::sync::atomic::{AtomicU64, Ordering};

use mayfly::{Request, Response};

static CALLS: AtomicU64 = AtomicU64::new(0);

#[mayfly::http]
async fn counter(_request: Request) -> Response {
    let calls = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    Response::text(format!("{calls}\n"))
}
