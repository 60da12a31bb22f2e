//! The smallest function: says hello.

use mayfly::{Request, Response};

#[mayfly::http]
async fn hello(_request: Request) -> Response {
    Response::text("Hello from Mayfly!\n")
}
