//! A misbehaving guest: fills 48 MiB of memory in a loop, with one instruction for all of it. The platform ends it at
//! `limits.timeout`.

use mayfly::{Request, Response};

const BYTES: usize = 48 << 20;

#[mayfly::http]
async fn fill(_request: Request) -> Response {
    let mut memory = vec![0_u8; BYTES];
    loop {
        std::hint::black_box(&mut memory).fill(0xA5);
    }
}
