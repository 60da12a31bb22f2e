//! A faulty guest: responds twice. The SDK prevents this, so it uses WASI directly.

use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{Fields, IncomingRequest, OutgoingBody, OutgoingResponse, ResponseOutparam};

struct Twice;

impl Guest for Twice {
    fn handle(_request: IncomingRequest, out: ResponseOutparam) {
        // SAFETY: violated on purpose: the handle is used twice, which the host must detect.
        let again = unsafe { ResponseOutparam::from_handle(out.handle()) };
        answer(out, b"first\n");
        answer(again, b"second\n");
    }
}

fn answer(out: ResponseOutparam, text: &[u8]) {
    let response = OutgoingResponse::new(Fields::new());
    let body = response.body().expect("taken once");
    ResponseOutparam::set(out, Ok(response));
    let stream = body.write().expect("taken once");
    stream.blocking_write_and_flush(text).expect("the caller reads");
    drop(stream);
    OutgoingBody::finish(body, None).expect("complete");
}

wasip2::http::proxy::export!(Twice);
