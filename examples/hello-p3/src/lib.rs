//! Says hello over `wasi:http/handler@0.3`, the asynchronous version of the interface.

use wasip3::exports::http::handler::Guest;
use wasip3::http::types::{ErrorCode, Fields, Request, Response};
use wasip3::{wit_future, wit_stream};

struct Hello;

impl Guest for Hello {
    async fn handle(_request: Request) -> Result<Response, ErrorCode> {
        let headers = Fields::new();
        headers.set("content-type", &[b"text/plain; charset=utf-8".to_vec()]).expect("a valid header");
        let (mut body, contents) = wit_stream::new();
        let (no_trailers, trailers) = wit_future::new(|| Ok(None));
        drop(no_trailers);
        let (response, _sent) = Response::new(headers, Some(contents), trailers);
        wasip3::spawn_local(async move {
            body.write_all(b"Hello from Mayfly!\n".to_vec()).await;
        });
        Ok(response)
    }
}

wasip3::http::service::export!(Hello);
