//! A misbehaving guest: allocates memory until there is none; `?mib=N` allocates and touches N MiB, then answers.

use mayfly::{Error, Request, Response};

const MIB: usize = 1 << 20;

#[mayfly::http]
async fn memory_hog(request: Request) -> Result<Response, Error> {
    let mib: usize = match request.query("mib") {
        Some(text) => text.parse().map_err(|_| Error::bad_request("?mib= is not a number"))?,
        None => usize::MAX,
    };
    let mut taken = Vec::new();
    while taken.len() < mib {
        // Not zero, because pages of zeros may not use real memory.
        taken.push(std::hint::black_box(vec![0xA5_u8; MIB]));
    }
    Ok(Response::text(format!("holding {} MiB\n", taken.len())))
}
