//! Fetches `?url=…` (or the setting UPSTREAM) and streams the response back.
//!
//! A destination that `egress` does not list is denied, and the caller gets a 502 with the reason.

use mayfly::{Error, Request, Response};

#[mayfly::http]
async fn proxy(request: Request) -> Result<Response, Error> {
    let url = request
        .query("url")
        .or_else(|| mayfly::config::get("UPSTREAM"))
        .ok_or_else(|| Error::bad_request("the target is missing: give ?url=… or the setting UPSTREAM"))?;
    Ok(mayfly::http::get(url).await?)
}
