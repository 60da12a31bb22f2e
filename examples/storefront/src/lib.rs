//! A component of a Spin application: responds with the file that the rest of its route names, or otherwise with its
//! variables and its route.

use mayfly::{IntoResponse as _, Json, Request, Response};
use serde_json::json;

wit_bindgen::generate!({ path: "wit", world: "storefront" });

use fermyon::spin::variables;

#[mayfly::http]
async fn storefront(request: Request) -> Response {
    let header = |name: &str| request.header(name).unwrap_or_default().to_owned();
    let rest = header("spin-path-info");
    if !rest.is_empty() {
        return match std::fs::read_to_string(&rest) {
            Ok(text) => Response::text(text),
            Err(error) => Response::text(format!("{rest}: {error}\n")).with_status(404),
        };
    }
    let variable = |name: &str| match variables::get(name) {
        Ok(value) => value,
        Err(error) => format!("{error:?}"),
    };
    let written = std::fs::write("/new.txt", "x").map_err(|error| error.to_string());
    Json(json!({
        "greeting": variable("greeting"),
        "token": variable("token"),
        "none": variable("none"),
        "bad name": variable("Bad-Name"),
        "mode": std::env::var("MODE").unwrap_or_default(),
        "route": header("spin-matched-route"),
        "url": header("spin-full-url"),
        "written": written.err(),
    }))
    .into_response()
}
