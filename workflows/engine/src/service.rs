//! The operations of Step Functions with typed inputs, outputs and errors.
//!
//! [`WorkflowService`] puts the catalog of state machines and the engine together: it resolves what an ARN names,
//! applies AWS's rules and reports violations with AWS's codes and messages ([`ServiceError`]). The wire API decodes
//! JSON into these types; triggers, the reconciler of Workflow objects and tasks that start executions call the service
//! directly.
//!
//! Not here: JSON of requests and responses, page tokens and the constraints of the public service model (the API).

mod activities;
mod aliases;
mod callbacks;
mod error;
mod executions;
mod map_runs;
mod names;
mod resolve;
mod state_machines;
mod test_state;
mod validation;
mod versions;

pub use activities::CreateActivity;
pub use aliases::{CreateAlias, UpdateAliasRequest, check_routes};
pub use callbacks::{SendTaskFailure, SendTaskSuccess};
pub use error::ServiceError;
pub(crate) use executions::parse_input;
pub use executions::{ExecutionDefinition, PAYLOAD_BYTES_MAX, StartExecution};
pub use names::{CredentialScope, ResourceName, check_role};
pub use resolve::compiled;
pub use state_machines::{
    CreateStateMachine, CreatedStateMachine, DescribedStateMachine, UpdateStateMachine, UpdatedStateMachine,
};
pub use validation::{ValidateDefinition, ValidatedDefinition};

use std::sync::Arc;

use crate::catalog::{Catalog, CatalogChange, CatalogError, CatalogRejection, CatalogState};
use crate::engine::{Engine, Page};

/// The operations of Step Functions over one engine and its catalog. Cheap to clone.
#[derive(Debug, Clone)]
pub struct WorkflowService {
    engine: Engine,
}

/// The part of a list that a caller wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRequest {
    /// The maximum number of items.
    pub limit: usize,
    /// [`Page::next`] of the page before; the first page without it.
    pub after: Option<String>,
}

impl WorkflowService {
    /// The service over this engine and the catalog that the engine was opened with.
    pub fn new(engine: Engine) -> Self {
        Self { engine }
    }

    /// The engine below.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The catalog of state machines.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.engine.inner.deps.catalog
    }

    /// The current time, in milliseconds since the epoch.
    pub fn now_ms(&self) -> i64 {
        self.engine.inner.now_ms()
    }

    /// Sixteen fresh random bytes.
    pub fn random_bytes(&self) -> [u8; 16] {
        self.engine.inner.deps.randomness.bytes()
    }

    /// A fresh random UUID.
    pub fn random_uuid(&self) -> String {
        self.engine.inner.deps.randomness.uuid().to_string()
    }

    /// Changes the catalog. The change waits for the disk on a thread for blocking work.
    async fn change<T: Send + 'static>(
        &self,
        plan: impl FnOnce(&CatalogState) -> Result<(Vec<CatalogChange>, T), CatalogRejection> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let catalog = Arc::clone(self.catalog());
        match tokio::task::spawn_blocking(move || catalog.change(plan)).await {
            Ok(outcome) => Ok(outcome?),
            Err(_) => Err(CatalogRejection::Store(CatalogError::Interrupted).into()),
        }
    }
}

/// Cuts a sorted list into a page: the items that follow `after` by `key`.
fn page<T>(items: impl IntoIterator<Item = T>, request: &PageRequest, key: impl Fn(&T) -> String) -> Page<T> {
    let mut items = items.into_iter();
    if let Some(after) = &request.after {
        items.by_ref().find(|item| key(item) == *after);
    }
    let mut page: Vec<T> = items.take(request.limit + 1).collect();
    let next = if page.len() > request.limit {
        page.truncate(request.limit);
        page.last().map(&key)
    } else {
        None
    };
    Page { items: page, next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_without_gap_or_overlap() {
        let items: Vec<String> = (0..13).map(|n| format!("{n:02}")).collect();
        let mut seen = Vec::new();
        let mut request = PageRequest { limit: 5, after: None };
        loop {
            let page = page(items.clone(), &request, String::clone);
            assert!(page.items.len() <= 5);
            seen.extend(page.items);
            request.after = page.next;
            if request.after.is_none() {
                break;
            }
        }
        assert_eq!(seen, items);
    }
}
