//! Outbound requests.

use wasip2::http::outgoing_handler;
use wasip2::http::types::{FutureIncomingResponse, OutgoingRequest, RequestOptions, Scheme};

use super::body::Incoming;
use super::{Body, Content, Headers, HttpError, HttpErrorKind, Request, Response};
use crate::executor;

/// Fetches a URL.
pub async fn get(url: impl Into<String>) -> Result<Response, HttpError> {
    send(Request::get(url)).await
}

/// Posts a body to a URL.
pub async fn post(url: impl Into<String>, body: impl Into<Body>) -> Result<Response, HttpError> {
    send(Request::post(url).with_body(body)).await
}

/// Sends a request; the same as [`Request::send`].
///
/// The rest of the request's body is sent after the head of the response has arrived.
pub async fn send(request: Request) -> Result<Response, HttpError> {
    let what = format!("{} {}", request.method(), request.target());
    exchange(request).await.map_err(|error| error.while_doing(&what))
}

async fn exchange(request: Request) -> Result<Response, HttpError> {
    let method = request.method().to_wasi();
    let url = Url::parse(request.target())?;
    let options = request.timeout().map(|timeout| {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let options = RequestOptions::new();
        // A host that does not support a timeout keeps its own.
        let _ = options.set_connect_timeout(Some(nanos));
        let _ = options.set_first_byte_timeout(Some(nanos));
        let _ = options.set_between_bytes_timeout(Some(nanos));
        options
    });
    let authority = url.authority.to_owned();
    let target = url.path_with_query.clone();
    let scheme = if url.encrypted { Scheme::Https } else { Scheme::Http };

    let (mut headers, body) = request.into_parts();
    headers.remove("host"); // the authority has it
    if let Some(length @ 1..) = body.known_len() {
        headers.insert("content-length", length.to_string());
    }
    let outgoing = OutgoingRequest::new(headers.into_wasi()?);
    let invalid = |what| move |()| HttpError::new(HttpErrorKind::InvalidRequest, format!("invalid {what}"));
    outgoing.set_method(&method).map_err(invalid("method"))?;
    outgoing.set_scheme(Some(&scheme)).map_err(invalid("scheme"))?;
    outgoing.set_authority(Some(&authority)).map_err(invalid("host name in the URL"))?;
    outgoing.set_path_with_query(Some(&target)).map_err(invalid("path in the URL"))?;

    let outgoing_body = outgoing.body().expect("the body of a request is taken once");
    let pending = outgoing_handler::handle(outgoing, options).map_err(|code| HttpError::from_code(&code))?;
    // A failed upload shows up in the response, or as its failure.
    executor::spawn(async move {
        let _ = body.send(outgoing_body).await;
    });
    receive(pending).await
}

async fn receive(pending: FutureIncomingResponse) -> Result<Response, HttpError> {
    executor::ready(pending.subscribe()).await;
    let incoming =
        pending.get().expect("ready").expect("taken once").map_err(|code| HttpError::from_code(&code))?;
    let headers = Headers::from_wasi(&incoming.headers());
    let body = match incoming.consume() {
        Ok(body) => Body(Content::Incoming(Incoming::new(body))),
        Err(()) => Body::empty(),
    };
    Ok(Response::from_parts(incoming.status(), headers, body))
}

/// The parts of a URL.
#[derive(Debug, PartialEq)]
struct Url<'a> {
    encrypted: bool,
    authority: &'a str,
    path_with_query: String,
}

impl<'a> Url<'a> {
    fn parse(text: &'a str) -> Result<Self, HttpError> {
        let invalid = |problem: &str| HttpError::new(HttpErrorKind::InvalidRequest, problem);
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("this is not a URL"))?;
        let encrypted = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err(invalid("only http and https are supported")),
        };
        let rest = rest.split('#').next().unwrap_or(rest);
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        if authority.is_empty() {
            return Err(invalid("the host is missing"));
        }
        let path_with_query = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Url { encrypted, authority, path_with_query })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let cases = [
            ("https://a.example", (true, "a.example", "/")),
            ("HTTP://a:8080/x?y#z", (false, "a:8080", "/x?y")),
            ("http://a?x=/b", (false, "a", "/?x=/b")),
            ("http://[::1]:80/x", (false, "[::1]:80", "/x")),
        ];
        for (text, (encrypted, authority, target)) in cases {
            let expected = Url { encrypted, authority, path_with_query: target.to_owned() };
            assert_eq!(Url::parse(text).unwrap(), expected, "{text}");
        }
        for text in ["/path", "ftp://a", "http://", "http:///x", ""] {
            assert_eq!(Url::parse(text).unwrap_err().kind(), HttpErrorKind::InvalidRequest, "{text}");
        }
    }
}
