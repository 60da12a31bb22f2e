//! A misbehaving guest: writes without end, to the response, or to the log on `/log`.

use mayfly::{Request, Response};

const LINE: &str = "all work and no play makes a function a dull function\n";

#[mayfly::http]
async fn flood(request: Request) -> Response {
    if request.path() == "/log" {
        loop {
            print!("{LINE}");
        }
    }
    Response::stream(async |out| {
        let block = LINE.repeat(1_000);
        loop {
            out.write(&block).await?;
        }
    })
}
