//! A misbehaving guest: traps, with a message in its log. With `?exit=` it exits with that code instead.

use mayfly::{Request, Response};

#[mayfly::http]
async fn panic(request: Request) -> Response {
    if let Some(code) = request.query("exit").and_then(|code| code.parse().ok()) {
        std::process::exit(code);
    }
    panic!("this function panics on every call");
}
