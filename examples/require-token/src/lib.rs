//! Middleware: passes a request on to the next handler if it has the bearer token of the variable TOKEN, and responds
//! with 401 otherwise.
//!
//! `mayfly deploy hello.wasm --middleware require-token.wasm --env TOKEN=secret` links it in front of a handler.

use std::io::Write as _;

use wasip2::http::types::{Fields, IncomingRequest, OutgoingBody, OutgoingResponse, ResponseOutparam};

/// The interface that the middleware imports; `wasip2` generates only exports of handlers.
mod next {
    wit_bindgen::generate!({
        inline: "
            package mayfly:middleware;

            world imports {
                import wasi:http/incoming-handler@0.2.12;
            }

            package wasi:http@0.2.12 {
                interface types {
                    resource incoming-request;
                    resource response-outparam;
                }

                interface incoming-handler {
                    use types.{incoming-request, response-outparam};
                    handle: func(request: incoming-request, response-out: response-outparam);
                }
            }
        ",
        with: { "wasi:http/types@0.2.12": wasip2::http::types },
        generate_all,
    });

    pub use wasi::http::incoming_handler::handle;
}

struct RequireToken;

impl wasip2::exports::http::incoming_handler::Guest for RequireToken {
    fn handle(request: IncomingRequest, response_out: ResponseOutparam) {
        match std::env::var("TOKEN") {
            Ok(token) if carries(&request, &token) => next::handle(request, response_out),
            Ok(_) => refuse(response_out, 401, "a bearer token is required\n"),
            Err(_) => refuse(response_out, 500, "the variable TOKEN is not set\n"),
        }
    }
}

wasip2::http::proxy::export!(RequireToken);

fn carries(request: &IncomingRequest, token: &str) -> bool {
    let expected = format!("Bearer {token}");
    let values = request.headers().get("authorization");
    matches!(values.as_slice(), [value] if equal(value, expected.as_bytes()))
}

/// Compares all bytes, so that the time does not depend on the number of matching bytes.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |diff, (a, b)| diff | (a ^ b)) == 0
}

fn refuse(response_out: ResponseOutparam, status: u16, text: &str) {
    let headers = Fields::new();
    if status == 401 {
        headers.append("www-authenticate", b"Bearer").expect("a valid header");
    }
    let response = OutgoingResponse::new(headers);
    response.set_status_code(status).expect("a valid status");
    let body = response.body().expect("the body is taken once");
    ResponseOutparam::set(response_out, Ok(response));
    let mut stream = body.write().expect("the stream is taken once");
    // A client that has disconnected needs no text.
    let _ = stream.write_all(text.as_bytes()).and_then(|()| std::io::Write::flush(&mut stream));
    drop(stream);
    let _ = OutgoingBody::finish(body, None);
}
