//! Writes `?lines=` lines to stdout and as many to stderr, as plain text and structured; and `?part=` without a
//! newline.

use mayfly::{Request, Response, log};

#[mayfly::http]
async fn logger(request: Request) -> Response {
    let lines: u32 = request.query("lines").and_then(|text| text.parse().ok()).unwrap_or(1);
    for n in 1..=lines {
        println!("plain line {n} on stdout");
        eprintln!("plain line {n} on stderr");
        log::info!(line = n, path = request.path(); "structured, on stdout");
        log::warn!(line = n, path = request.path(); "structured, on stderr");
    }
    if let Some(part) = request.query("part") {
        print!("{part}");
    }
    Response::text(format!("wrote {lines} lines\n"))
}
