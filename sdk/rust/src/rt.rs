//! The runtime of the attributes: connects the component's export to the handler.

use std::future::Future;
use std::io::Write as _;

use serde::Serialize;
use serde::de::DeserializeOwned;
pub use wasip2;
pub use wasip2::_export_proxy as export;
pub use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::OutgoingResponse;
pub use wasip2::http::types::{IncomingRequest, ResponseOutparam};

use crate::http::{HttpError, HttpErrorKind, IntoResponse, Json, Method, Request, Response};
use crate::{Error, block_on};

/// Serves one request with an HTTP handler.
pub fn serve<H, F>(request: IncomingRequest, out: ResponseOutparam, handler: H)
where
    H: FnOnce(Request) -> F,
    F: Future<Output: IntoResponse>,
{
    block_on(async {
        let response = handler(Request::incoming(request)).await.into_response();
        answer(response, out).await;
    });
    flush();
}

/// Serves one request with an event handler.
pub fn serve_event<H, F, In, Out, E>(request: IncomingRequest, out: ResponseOutparam, handler: H)
where
    H: FnOnce(In) -> F,
    F: Future<Output = Result<Out, E>>,
    In: DeserializeOwned,
    Out: Serialize,
    E: Into<Error>,
{
    block_on(async {
        let response = call(Request::incoming(request), handler).await;
        answer(response, out).await;
    });
    flush();
}

/// Flushes output without a newline: there is no `main` whose return flushes it, and in a reused instance it would
/// appear in the log of the next request.
fn flush() {
    // An error of a closed log cannot be reported.
    let _ = std::io::stdout().flush();
}

/// Handles one event: JSON in a POST request, JSON or an error in the response.
async fn call<H, F, In, Out, E>(request: Request, handler: H) -> Response
where
    H: FnOnce(In) -> F,
    F: Future<Output = Result<Out, E>>,
    In: DeserializeOwned,
    Out: Serialize,
    E: Into<Error>,
{
    if *request.method() != Method::Post {
        let error = Error::new("MethodNotAllowed", "send the event as JSON by POST").with_status(405);
        return error.to_response().with_header("allow", "POST");
    }
    match read_event(request).await {
        Ok(event) => handler(event).await.map(Json).into_response(),
        Err(error) => Error::from(error).to_response(),
    }
}

/// An empty body is the event `null`.
async fn read_event<In: DeserializeOwned>(request: Request) -> Result<In, HttpError> {
    let body = request.bytes().await?;
    let text = if body.is_empty() { b"null" } else { body.as_slice() };
    serde_json::from_slice(text).map_err(|error| {
        HttpError::new(
            HttpErrorKind::InvalidBody,
            format!("the event does not match the type that this function expects: {error}"),
        )
    })
}

/// The response for a failed handler; the error is also logged.
pub(crate) fn failed(error: Error) -> Response {
    if error.status() >= 500 {
        crate::log::error!(errorType = error.error_type(); "{}", error.message());
    }
    error.to_response()
}

/// Sends the response.
async fn answer(response: Response, out: ResponseOutparam) {
    let (status, mut headers, body) = response.into_parts();
    // These have no body, and therefore no length.
    let bodiless = matches!(status, 100..=199 | 204 | 304);
    if let Some(length) = body.known_len().filter(|_| !bodiless) {
        headers.insert("content-length", length.to_string());
    }
    let outgoing = match headers.into_wasi() {
        Ok(fields) => OutgoingResponse::new(fields),
        Err(error) => return refuse(error, out).await,
    };
    if status != 200 && outgoing.set_status_code(status).is_err() {
        let error = HttpError::new(HttpErrorKind::InvalidRequest, format!("{status} is not an HTTP status"));
        return refuse(error, out).await;
    }
    if body.known_len() == Some(0) {
        return ResponseOutparam::set(out, Ok(outgoing));
    }
    let outgoing_body = outgoing.body().expect("the body of a response is taken once");
    ResponseOutparam::set(out, Ok(outgoing));
    if let Err(error) = body.send(outgoing_body).await {
        // The head has been sent: abort the response, and log the error.
        crate::log::warn!(errorType = error.error_type(); "the response was aborted: {}", error.message());
    }
}

/// Replaces a response that cannot be sent by a 500 with the reason.
async fn refuse(error: HttpError, out: ResponseOutparam) {
    crate::log::error!("cannot send the response: {error}");
    let response = crate::Error::new("InvalidResponse", error.to_string()).to_response();
    // Its status and headers are valid, so there is no further recursion.
    Box::pin(answer(response, out)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize, serde::Serialize, PartialEq, Debug)]
    struct Name {
        name: String,
    }

    async fn greet(event: Name) -> Result<String, Error> {
        match event.name.as_str() {
            "" => Err(Error::bad_request("who?")),
            "crash" => Err(Error::new("Crash", "as asked")),
            name => Ok(format!("Hello, {name}!")),
        }
    }

    fn answer_to(request: Request) -> (u16, serde_json::Value) {
        let response = block_on(call(request, greet));
        let status = response.status();
        (status, block_on(response.into_json()).unwrap())
    }

    #[test]
    fn events_come_and_go_as_json() {
        let (status, body) = answer_to(Request::post("/").with_json(&Name { name: "Ada".into() }));
        assert_eq!((status, body), (200, "Hello, Ada!".into()));
    }

    #[test]
    fn errors_carry_type_and_message() {
        let cases = [
            ("{\"name\":\"\"}", 400, "BadRequest", "who?"),
            ("{\"name\":\"crash\"}", 500, "Crash", "as asked"),
            ("{\"name\":1}", 400, "InvalidBody", "expected a string"),
            ("{", 400, "InvalidBody", "EOF"),
            ("", 400, "InvalidBody", "null"),
        ];
        for (event, status, error_type, message) in cases {
            let (got, body) = answer_to(Request::post("/").with_body(event));
            assert_eq!((got, body["errorType"].as_str().unwrap()), (status, error_type), "{event}");
            assert!(body["errorMessage"].as_str().unwrap().contains(message), "{body}");
        }
    }

    #[test]
    fn an_event_is_a_post() {
        let (status, body) = answer_to(Request::get("/"));
        assert_eq!((status, body["errorType"].as_str()), (405, Some("MethodNotAllowed")));
    }

    #[test]
    fn an_empty_body_is_null() {
        async fn anything(event: Option<Name>) -> Result<bool, Error> {
            Ok(event.is_none())
        }
        let response = block_on(call(Request::post("/"), anything));
        assert!(block_on(response.into_json::<bool>()).unwrap());
    }
}
