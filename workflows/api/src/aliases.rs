//! CreateStateMachineAlias, UpdateStateMachineAlias, DescribeStateMachineAlias, DeleteStateMachineAlias,
//! ListStateMachineAliases.

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};
use serde_json::{Value, json};

use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, StepFunctionsError, paging};
use mayfly_workflows_engine::catalog::{Alias, NewAlias, Route, UpdateAlias};

impl Api {
    pub(super) async fn create_alias(&self, params: &Value) -> Answer {
        let routes = routes(params)?.unwrap_or_default();
        let machine_arn = match routes.first() {
            Some(route) => route.version_arn.unqualified(),
            None => return Err(StepFunctionsError::resource_missing()),
        };
        self.finish_deletion(&machine_arn).await?;
        let new = NewAlias {
            machine_arn,
            name: text(params, "name").to_owned(),
            description: optional(params, "description").map(str::to_owned),
            routes,
            now: self.now(),
        };
        let alias = self.change(|book| book.plan_create_alias(new)).await?;
        Ok(json!({"stateMachineAliasArn": alias.arn.as_str(), "creationDate": date(alias.created)}))
    }

    pub(super) async fn update_alias(&self, params: &Value) -> Answer {
        let (machine_arn, name) = alias_of(text(params, "stateMachineAliasArn"))?;
        let description = optional(params, "description").map(str::to_owned);
        let routes = routes(params)?;
        if description.is_none() && routes.is_none() {
            return Err(StepFunctionsError::validation(
                "Either the description or routing configuration must be specified",
            )
            .with("reason", "MISSING_REQUIRED_PARAMETER"));
        }
        let update = UpdateAlias { machine_arn, name, description, routes, now: self.now() };
        let updated = self.change(|book| book.plan_update_alias(update)).await?;
        Ok(json!({"updateDate": date(updated)}))
    }

    pub(super) fn describe_alias(&self, params: &Value) -> Answer {
        let (machine_arn, name) = alias_of(text(params, "stateMachineAliasArn"))?;
        let book = self.catalog.read();
        let alias = book.alias(&machine_arn, &name).ok_or_else(StepFunctionsError::resource_missing)?;
        let fields = ResponseFields::default()
            .set("stateMachineAliasArn", alias.arn.as_str())
            .set("name", alias.name.as_str())
            .maybe("description", alias.description.clone())
            .set("routingConfiguration", routing(alias))
            .set("creationDate", date(alias.created))
            .set("updateDate", date(alias.updated));
        Ok(fields.done())
    }

    pub(super) async fn delete_alias(&self, params: &Value) -> Answer {
        let (machine_arn, name) = alias_of(text(params, "stateMachineAliasArn"))?;
        self.change(move |book| book.plan_delete_alias(&machine_arn, &name)).await?;
        Ok(json!({}))
    }

    /// In order of creation; a version's ARN lists the aliases that route to it.
    pub(super) fn list_aliases(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let list = format!("ListStateMachineAliases {arn}");
        let after = paging::position(&list, params)?;
        let book = self.catalog.read();
        let machine = book.live(&arn.unqualified())?;
        let mut all: Vec<_> = book.aliases(&machine.arn).collect();
        if arn.qualifier().is_some() {
            all.retain(|alias| alias.routes.iter().any(|route| route.version_arn == arn));
        }
        all.sort_by_key(|alias| alias.order);
        let size = paging::page_size(params);
        let (page, next) = paging::page(all, size, after.as_deref(), |alias| alias.name.clone());
        let items = page.into_iter().map(
            |alias| json!({"stateMachineAliasArn": alias.arn.as_str(), "creationDate": date(alias.created)}),
        );
        let next = next.map(|position| paging::token(&list, &position));
        let fields = ResponseFields::default().set("stateMachineAliases", items.collect::<Vec<_>>());
        Ok(fields.maybe("nextToken", next).done())
    }
}

fn routing(alias: &Alias) -> Vec<Value> {
    let route =
        |route: &Route| json!({"stateMachineVersionArn": route.version_arn.as_str(), "weight": route.weight});
    alias.routes.iter().map(route).collect()
}

/// The machine and the name in an alias's ARN.
fn alias_of(text: &str) -> Result<(StateMachineArn, String), StepFunctionsError> {
    let arn = StateMachineArn::parse(text)?;
    match arn.qualifier() {
        Some(ArnQualifier::Alias(name)) => Ok((arn.unqualified(), name.to_owned())),
        _ => Err(StepFunctionsError::invalid_arn(format_args!("Invalid alias ARN: {text}"))),
    }
}

/// The routing configuration against the rules that need no catalog, in LocalStack's order: each version once, weights
/// that sum up to 100, versions only, of one machine.
fn routes(params: &Value) -> Result<Option<Vec<Route>>, StepFunctionsError> {
    let Some(given) = params.get("routingConfiguration").and_then(Value::as_array) else { return Ok(None) };
    let route = |route: &Value| {
        Ok(Route {
            version_arn: StateMachineArn::parse(text(route, "stateMachineVersionArn"))?,
            weight: route.get("weight").and_then(Value::as_u64).unwrap_or(0),
        })
    };
    let routes: Vec<Route> = given.iter().map(route).collect::<Result<_, StepFunctionsError>>()?;
    let refused = |must: &str| {
        let received: Vec<&str> = routes.iter().map(|route| route.version_arn.as_str()).collect();
        let received = received.join(", ");
        Err(StepFunctionsError::validation(format!(
            "Routing configuration must contain {must}. Received: [{received}]"
        )))
    };
    if routes.len() == 2 && routes[0].version_arn == routes[1].version_arn {
        return refused("distinct state machine version ARNs");
    }
    if routes.iter().map(|route| route.weight).sum::<u64>() != 100 {
        let weights: Vec<String> = routes.iter().map(|route| route.weight.to_string()).collect();
        return Err(StepFunctionsError::validation(format!(
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
    Ok(Some(routes))
}
