//! Returns the environment of the function as JSON.

use std::collections::BTreeMap;

use mayfly::{Json, Request};

#[mayfly::http]
async fn env(_request: Request) -> Json<BTreeMap<String, String>> {
    Json(std::env::vars().collect())
}
