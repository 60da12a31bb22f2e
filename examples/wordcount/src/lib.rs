//! Counts the words of a body of any size, with one chunk of it in memory at a time.

use mayfly::{Error, Json, Request};
use serde::Serialize;

#[derive(Serialize, Default)]
struct Count {
    bytes: u64,
    lines: u64,
    words: u64,
}

#[mayfly::http]
async fn wordcount(mut request: Request) -> Result<Json<Count>, Error> {
    let mut count = Count::default();
    let mut in_word = false;
    while let Some(chunk) = request.body_mut().chunk().await? {
        count.bytes += chunk.len() as u64;
        for byte in chunk {
            let space = byte.is_ascii_whitespace();
            count.words += u64::from(!space && !in_word);
            count.lines += u64::from(byte == b'\n');
            in_word = !space;
        }
    }
    Ok(Json(count))
}
