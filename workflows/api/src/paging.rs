//! Page tokens: opaque to the caller, bound to the operation and checked when they are used.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::error::StepFunctionsError;
use mayfly_workflows_engine::service::{PageRequest, ServiceError};

/// AWS's number of items on a page when the request names none (or 0).
pub(crate) const PAGE_SIZE: usize = 100;
/// AWS's largest page.
pub(crate) const PAGE_SIZE_MAX: usize = 1000;

/// The requested number of items on a page.
pub(crate) fn page_size(params: &Value) -> usize {
    let asked = params.get("maxResults").and_then(Value::as_u64).unwrap_or(0);
    match usize::try_from(asked).unwrap_or(PAGE_SIZE_MAX) {
        0 => PAGE_SIZE,
        asked => asked.min(PAGE_SIZE_MAX),
    }
}

/// The token of the page that begins after `position` in a list. `list` identifies the list by the operation and the
/// resource.
pub(crate) fn token(list: &str, position: &str) -> String {
    BASE64.encode(format!("{}{position}", mark(list, position)))
}

/// The position inside a token that [`token`] made for the same list; anything else is an InvalidToken.
pub(crate) fn position(list: &str, params: &Value) -> Result<Option<String>, StepFunctionsError> {
    let Some(token) = params.get("nextToken").and_then(Value::as_str) else { return Ok(None) };
    let bytes = BASE64.decode(token).map_err(|_| ServiceError::InvalidToken)?;
    let text = String::from_utf8(bytes).map_err(|_| ServiceError::InvalidToken)?;
    let (found, position) = text.split_at_checked(MARK_LEN).ok_or(ServiceError::InvalidToken)?;
    if found == mark(list, position) {
        Ok(Some(position.to_owned()))
    } else {
        Err(ServiceError::InvalidToken.into())
    }
}

/// The page of `list` that a request names by its token and its number of items.
pub(crate) fn request(list: &str, params: &Value) -> Result<PageRequest, StepFunctionsError> {
    Ok(PageRequest { limit: page_size(params), after: position(list, params)? })
}

const MARK_LEN: usize = 16;

fn mark(list: &str, position: &str) -> String {
    let digest = Sha256::new().chain_update(list).chain_update([0]).chain_update(position).finalize();
    hex::encode(&digest[..MARK_LEN / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_token_opens_only_the_list_it_was_made_for() {
        let params = json!({"nextToken": token("ListActivities", "b")});
        assert_eq!(position("ListActivities", &params).expect("ours"), Some("b".into()));
        assert_eq!(position("ListStateMachines", &params).expect_err("another list").code, "InvalidToken");
        let made_up = json!({"nextToken": "InvalidToken"});
        assert_eq!(position("ListActivities", &made_up).expect_err("made up").code, "InvalidToken");
    }
}
