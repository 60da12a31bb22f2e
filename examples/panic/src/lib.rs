//! Bad citizen: traps. The message is in its log.

use mayfly::{Request, Response};

#[mayfly::http]
async fn panic(_request: Request) -> Response {
    panic!("this function panics on every call");
}
