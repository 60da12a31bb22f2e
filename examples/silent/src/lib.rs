//! A faulty guest: returns without a response. The SDK prevents this, so it uses WASI directly.

use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{IncomingRequest, ResponseOutparam};

struct Silent;

impl Guest for Silent {
    fn handle(_request: IncomingRequest, _out: ResponseOutparam) {}
}

wasip2::http::proxy::export!(Silent);
