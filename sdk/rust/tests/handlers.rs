//! The permitted signatures of handlers, and their responses.

use mayfly::http::{Body, HttpErrorKind, Method};
use mayfly::{Error, IntoResponse, Json, Request, Response, block_on};

mod nothing_in {
    #[mayfly::http]
    async fn hello() -> &'static str {
        "hello"
    }

    #[mayfly::event]
    async fn tick() -> Result<u32, mayfly::Error> {
        Ok(1)
    }

    #[test]
    fn a_handler_may_take_nothing() {
        assert_eq!(mayfly::block_on(hello()), "hello");
        assert_eq!(mayfly::block_on(tick()).unwrap(), 1);
    }
}

mod errors_of_ones_own {
    use std::collections::BTreeMap;

    pub enum OrderError {
        SoldOut,
    }

    impl From<OrderError> for mayfly::Error {
        fn from(OrderError::SoldOut: OrderError) -> Self {
            mayfly::Error::new("SoldOut", "nothing left").with_status(409)
        }
    }

    #[mayfly::event]
    pub async fn order(stock: BTreeMap<String, u32>) -> Result<u32, OrderError> {
        stock.get("tea").copied().filter(|left| *left > 0).ok_or(OrderError::SoldOut)
    }
}

/// Attributes, visibility and a generic parameter type with a comma are accepted by the attribute.
#[mayfly::http]
#[allow(clippy::unused_async)]
pub(crate) async fn echo(mut request: Request) -> Result<Response, Error> {
    let mut copy = Vec::new();
    while let Some(chunk) = request.body_mut().chunk().await? {
        copy.extend_from_slice(&chunk);
    }
    let mut response = Response::new(201).with_body(copy);
    for (name, value) in request.headers().iter().filter(|(name, _)| name.starts_with("x-")) {
        response.headers_mut().append(name, value);
    }
    Ok(response)
}

#[test]
fn a_request_comes_back() {
    let request = Request::new(Method::Put, "/any").with_header("X-Trace", "7").with_body("body");
    let response = block_on(echo(request)).unwrap();
    assert_eq!((response.status(), response.header("x-trace")), (201, Some("7")));
    assert_eq!(block_on(response.bytes()).unwrap(), b"body");
}

#[test]
fn what_is_returned_becomes_a_response() {
    let text = |response: Response| (response.status(), block_on(response.into_text()).unwrap());
    assert_eq!(text(().into_response()), (204, String::new()));
    assert_eq!(text("hi".into_response()), (200, "hi".to_owned()));
    assert_eq!(text(Json([1, 2]).into_response()), (200, "[1,2]".to_owned()));
    let failed: Result<Response, Error> = Err(Error::not_found("no such page"));
    let (status, body) = text(failed.into_response());
    assert_eq!((status, body.as_str()), (404, r#"{"errorMessage":"no such page","errorType":"NotFound"}"#));
}

#[test]
fn an_error_of_ones_own_keeps_its_name_and_status() {
    let empty = [("tea".to_owned(), 0)].into();
    let error = Error::from(block_on(errors_of_ones_own::order(empty)).unwrap_err());
    assert_eq!((error.error_type(), error.status()), ("SoldOut", 409));
}

#[test]
fn what_an_upstream_sent_wrongly_is_not_the_callers_fault() {
    let response = Response::new(200).with_body("{");
    let error = block_on(response.into_json::<u32>()).unwrap_err();
    assert_eq!(error.kind(), HttpErrorKind::Protocol);
    let error = block_on(Request::post("/").with_body("{").json::<u32>()).unwrap_err();
    assert_eq!(error.kind(), HttpErrorKind::InvalidBody);
}

#[test]
fn streamed_bodies_can_be_read_in_tests() {
    let response = Response::stream(async |out| {
        for n in 0..3 {
            out.write(format!("{n} ")).await?;
        }
        Ok(())
    });
    assert_eq!(block_on(response.into_text()).unwrap(), "0 1 2 ");
    assert_eq!(block_on(Body::empty().text()).unwrap(), "");
}
