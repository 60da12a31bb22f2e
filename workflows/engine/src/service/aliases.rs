//! Aliases of versions: create, update, describe, delete, list.

use std::sync::Arc;

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};

use super::{PageRequest, ServiceError, WorkflowService, page};
use crate::catalog::{Alias, NewAlias, Route, UpdateAlias};
use crate::engine::Page;

/// An alias to create.
#[derive(Debug, Clone)]
pub struct CreateAlias {
    /// The alias's name.
    pub name: String,
    /// The alias's description.
    pub description: Option<String>,
    /// One route or two, checked by [`check_routes`].
    pub routes: Vec<Route>,
}

/// The changes of an alias; absent fields stay.
#[derive(Debug, Clone)]
pub struct UpdateAliasRequest {
    /// The alias's ARN.
    pub arn: StateMachineArn,
    /// The new description.
    pub description: Option<String>,
    /// The new routes, checked by [`check_routes`].
    pub routes: Option<Vec<Route>>,
}

/// Checks routes against the rules that need no catalog, in LocalStack's order: each version once, weights that sum up
/// to 100, versions only, of one state machine.
pub fn check_routes(routes: &[Route]) -> Result<(), ServiceError> {
    let refused = |must: &str| {
        let received: Vec<&str> = routes.iter().map(|route| route.version_arn.as_str()).collect();
        let received = received.join(", ");
        Err(ServiceError::validation(format!(
            "Routing configuration must contain {must}. Received: [{received}]"
        )))
    };
    if routes.len() == 2 && routes[0].version_arn == routes[1].version_arn {
        return refused("distinct state machine version ARNs");
    }
    if routes.iter().map(|route| route.weight).sum::<u64>() != 100 {
        let weights: Vec<String> = routes.iter().map(|route| route.weight.to_string()).collect();
        return Err(ServiceError::validation(format!(
            "Sum of routing configuration weights must equal 100. Received: [{}]",
            weights.join(", ")
        )));
    }
    let is_version = |route: &Route| matches!(route.version_arn.qualifier(), Some(ArnQualifier::Version(_)));
    if !routes.iter().all(is_version) {
        return refused("state machine version ARNs");
    }
    if routes.len() == 2 && routes[0].version_arn.unqualified() != routes[1].version_arn.unqualified() {
        return refused("versions of the same state machine");
    }
    Ok(())
}

impl WorkflowService {
    /// CreateStateMachineAlias. An equal request returns the alias that the first one created.
    ///
    /// # Errors
    /// A version does not exist, the name is taken by another alias, or the catalog cannot be written.
    pub async fn create_alias(&self, request: CreateAlias) -> Result<Arc<Alias>, ServiceError> {
        let CreateAlias { name, description, routes } = request;
        let machine_arn = match routes.first() {
            Some(route) => route.version_arn.unqualified(),
            None => return Err(ServiceError::ResourceNotFound),
        };
        self.finish_deletion(&machine_arn).await?;
        let new = NewAlias { machine_arn, name, description, routes, now: self.now_ms() };
        self.change(|book| book.plan_create_alias(new)).await
    }

    /// UpdateStateMachineAlias; returns the time of the update, in milliseconds since the epoch.
    ///
    /// # Errors
    /// Nothing is to be changed, the alias or a version does not exist, or the catalog cannot be written.
    pub async fn update_alias(&self, request: UpdateAliasRequest) -> Result<i64, ServiceError> {
        let (machine_arn, name) = alias_of(&request.arn)?;
        let UpdateAliasRequest { description, routes, .. } = request;
        if description.is_none() && routes.is_none() {
            return Err(ServiceError::Validation {
                message: "Either the description or routing configuration must be specified".to_owned(),
                reason: Some("MISSING_REQUIRED_PARAMETER"),
            });
        }
        let update = UpdateAlias { machine_arn, name, description, routes, now: self.now_ms() };
        self.change(|book| book.plan_update_alias(update)).await
    }

    /// DescribeStateMachineAlias.
    ///
    /// # Errors
    /// The ARN is not an alias's, or there is no such alias.
    pub fn describe_alias(&self, arn: &StateMachineArn) -> Result<Arc<Alias>, ServiceError> {
        let (machine_arn, name) = alias_of(arn)?;
        let book = self.catalog().read();
        book.alias(&machine_arn, &name).cloned().ok_or(ServiceError::ResourceNotFound)
    }

    /// DeleteStateMachineAlias. An alias that does not exist is deleted.
    ///
    /// # Errors
    /// The ARN is not an alias's, or the catalog cannot be written.
    pub async fn delete_alias(&self, arn: &StateMachineArn) -> Result<(), ServiceError> {
        let (machine_arn, name) = alias_of(arn)?;
        self.change(move |book| book.plan_delete_alias(&machine_arn, &name)).await
    }

    /// ListStateMachineAliases, in order of creation: those of a state machine, or those that route to a version.
    ///
    /// # Errors
    /// The state machine does not exist.
    pub fn list_aliases(
        &self,
        arn: &StateMachineArn,
        request: &PageRequest,
    ) -> Result<Page<Arc<Alias>>, ServiceError> {
        let book = self.catalog().read();
        let machine = book.live(&arn.unqualified())?;
        let mut all: Vec<Arc<Alias>> = book.aliases(&machine.arn).cloned().collect();
        if arn.qualifier().is_some() {
            all.retain(|alias| alias.routes.iter().any(|route| route.version_arn == *arn));
        }
        all.sort_by_key(|alias| alias.order);
        Ok(page(all, request, |alias| alias.name.clone()))
    }
}

/// The state machine and the name in an alias's ARN.
fn alias_of(arn: &StateMachineArn) -> Result<(StateMachineArn, String), ServiceError> {
    match arn.qualifier() {
        Some(ArnQualifier::Alias(name)) => Ok((arn.unqualified(), name.to_owned())),
        Some(ArnQualifier::Version(_)) | None => {
            Err(ServiceError::InvalidArn(format!("Invalid alias ARN: {arn}")))
        }
    }
}
