//! What nodes may not read although they list and watch Secrets as a whole: bootstrap tokens, with which the holder of a
//! node's credentials could join further machines.

use super::ResourceRequest;
use crate::{object::Object, status::ApiError};

const BOOTSTRAP_TOKEN: &str = "bootstrap.kubernetes.io/token";

impl ResourceRequest {
    fn reads_secrets_of_a_node(&self) -> bool {
        let kind = self.target.kind;
        self.user.node().is_some() && (kind.group, kind.plural) == ("", "secrets")
    }

    /// Leaves bootstrap tokens out of a node's lists and watches of Secrets.
    pub(super) fn hide_bootstrap_tokens(&mut self) {
        if self.reads_secrets_of_a_node() {
            let others = self.query.field_selector.take().filter(|others| !others.is_empty());
            let others = others.map(|others| format!("{others},")).unwrap_or_default();
            self.query.field_selector = Some(format!("{others}type!={BOOTSTRAP_TOKEN}"));
        }
    }

    /// Refuses a node's request for a bootstrap token.
    pub(super) fn check_read(&self, secret: &[u8], name: &str) -> Result<(), ApiError> {
        if !self.reads_secrets_of_a_node() {
            return Ok(());
        }
        let value = serde_json::from_slice(secret).map_err(ApiError::internal)?;
        match Object(value).str_at(&["type"]) == BOOTSTRAP_TOKEN {
            true => Err(ApiError::forbidden(self.target.kind, name, "nodes cannot read bootstrap tokens")),
            false => Ok(()),
        }
    }
}
