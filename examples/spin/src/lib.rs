//! A misbehaving guest: loops forever. The platform ends it at `limits.timeout`.

use mayfly::{Request, Response};

#[mayfly::http]
async fn spin(_request: Request) -> Response {
    loop {
        std::hint::spin_loop();
    }
}
