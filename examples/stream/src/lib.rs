//! `/` sends `?chunks=` lines, one every `?ms=` milliseconds, each as soon as it is written. `/echo` streams the
//! request's body back while it is received.

use std::time::Duration;

use mayfly::{Error, Request, Response};

#[mayfly::http]
async fn stream(request: Request) -> Result<Response, Error> {
    if request.path() == "/echo" {
        return Ok(Response::new(200).with_body(request.into_body()));
    }
    let chunks: u32 = parameter(&request, "chunks", 5)?;
    let pause = Duration::from_millis(parameter(&request, "ms", 100)?);
    Ok(Response::stream(async move |out| {
        for n in 1..=chunks {
            out.write(format!("chunk {n}\n")).await?;
            mayfly::time::sleep(pause).await;
        }
        Ok(())
    }))
}

fn parameter<T: std::str::FromStr>(request: &Request, name: &str, default: T) -> Result<T, Error> {
    let Some(text) = request.query(name) else { return Ok(default) };
    text.parse().map_err(|_| Error::bad_request(format!("?{name}= is not a number: {text:?}")))
}
