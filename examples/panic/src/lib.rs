//! Bad citizen: traps. The message is in its log. With `?exit=` it ends its process, as if it had one.

use mayfly::{Request, Response};

#[mayfly::http]
async fn panic(request: Request) -> Response {
    if let Some(code) = request.query("exit").and_then(|code| code.parse().ok()) {
        std::process::exit(code);
    }
    panic!("this function panics on every call");
}
