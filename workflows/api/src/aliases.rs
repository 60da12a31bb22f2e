//! CreateStateMachineAlias, UpdateStateMachineAlias, DescribeStateMachineAlias, DeleteStateMachineAlias,
//! ListStateMachineAliases.

use mayfly_workflows_language::arn::StateMachineArn;
use serde_json::{Value, json};

use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, StepFunctionsError, paging};
use mayfly_workflows_engine::catalog::{Alias, Route};
use mayfly_workflows_engine::service::{CreateAlias, UpdateAliasRequest, check_routes};

impl Api {
    pub(super) async fn create_alias(&self, params: &Value) -> Answer {
        let request = CreateAlias {
            routes: routes(params)?.unwrap_or_default(),
            name: text(params, "name").to_owned(),
            description: optional(params, "description").map(str::to_owned),
        };
        let alias = self.service.create_alias(request).await?;
        Ok(json!({"stateMachineAliasArn": alias.arn.as_str(), "creationDate": date(alias.created)}))
    }

    pub(super) async fn update_alias(&self, params: &Value) -> Answer {
        let request = UpdateAliasRequest {
            arn: alias_arn(params)?,
            description: optional(params, "description").map(str::to_owned),
            routes: routes(params)?,
        };
        Ok(json!({"updateDate": date(self.service.update_alias(request).await?)}))
    }

    pub(super) fn describe_alias(&self, params: &Value) -> Answer {
        let alias = self.service.describe_alias(&alias_arn(params)?)?;
        let fields = ResponseFields::default()
            .set("stateMachineAliasArn", alias.arn.as_str())
            .set("name", alias.name.as_str())
            .maybe("description", alias.description.clone())
            .set("routingConfiguration", routing(&alias))
            .set("creationDate", date(alias.created))
            .set("updateDate", date(alias.updated));
        Ok(fields.done())
    }

    pub(super) async fn delete_alias(&self, params: &Value) -> Answer {
        self.service.delete_alias(&alias_arn(params)?).await?;
        Ok(json!({}))
    }

    pub(super) fn list_aliases(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let list = format!("ListStateMachineAliases {arn}");
        let page = self.service.list_aliases(&arn, &paging::request(&list, params)?)?;
        let items = page.items.iter().map(
            |alias| json!({"stateMachineAliasArn": alias.arn.as_str(), "creationDate": date(alias.created)}),
        );
        let next = page.next.map(|position| paging::token(&list, &position));
        let fields = ResponseFields::default().set("stateMachineAliases", items.collect::<Vec<_>>());
        Ok(fields.maybe("nextToken", next).done())
    }
}

fn alias_arn(params: &Value) -> Result<StateMachineArn, StepFunctionsError> {
    Ok(StateMachineArn::parse(text(params, "stateMachineAliasArn"))?)
}

fn routing(alias: &Alias) -> Vec<Value> {
    let route =
        |route: &Route| json!({"stateMachineVersionArn": route.version_arn.as_str(), "weight": route.weight});
    alias.routes.iter().map(route).collect()
}

/// The routing configuration, if the request has one.
fn routes(params: &Value) -> Result<Option<Vec<Route>>, StepFunctionsError> {
    let Some(given) = params.get("routingConfiguration").and_then(Value::as_array) else { return Ok(None) };
    let route = |route: &Value| {
        Ok(Route {
            version_arn: StateMachineArn::parse(text(route, "stateMachineVersionArn"))?,
            weight: route.get("weight").and_then(Value::as_u64).unwrap_or(0),
        })
    };
    let routes: Vec<Route> = given.iter().map(route).collect::<Result<_, StepFunctionsError>>()?;
    check_routes(&routes)?;
    Ok(Some(routes))
}
